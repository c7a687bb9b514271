/** The form by which a person joins: what it shows of an offer, and what was chosen. */
import type { Data } from "../worker/messages";
import { newName, renamed, type Choices } from "./identity";
import { asked, type Offer } from "./offer";
import { counted, fromFolder, keep, kept, ofClass, unknown, type Photo } from "./photos";
import { element, problem } from "./view";

export class JoinForm {
  private readonly form = element<HTMLFormElement>("join");
  private photos: Photo[] = [];

  constructor(
    private readonly offer: Offer,
    private readonly secret: string,
    private readonly choices: Choices | null,
  ) {
    this.describe();
    this.showTiers();
    this.showData();
    this.field("id").value = choices?.id ?? newName(this.tier());
    this.fill();
  }

  /** Calls `join` with what was chosen each time the form is sent. */
  onJoin(join: (choices: Choices, data: Data) => void): void {
    let reading = false; // who presses twice joins once
    this.form.addEventListener("submit", (sent) => {
      sent.preventDefault();
      if (reading) return;
      reading = true;
      this.data()
        .then(
          (data) => (problem(""), join(this.chosen(), data)),
          (error: Error) => problem(error.message),
        )
        .finally(() => (reading = false));
    });
  }

  get login(): { username?: string; password?: string } {
    const [username, password] = [this.field("username").value, this.field("password").value];
    return this.offer.login && username ? { username, password } : {};
  }

  chosen(): Choices {
    return {
      id: this.field("id").value,
      tier: this.tier()?.name ?? "",
      data: this.checked("data") as Choices["data"],
      memory: Number(this.field("memory").value) * 2 ** 20 || (this.tier()?.memory_bytes ?? 0),
      threads: Number(this.field("threads").value) || 1,
      pauseHidden: this.field("hidden").checked,
      joined: true,
    };
  }

  /** What is trained on; an Error says what is missing. */
  async data(): Promise<Data> {
    const { federation, classes } = this.offer;
    const kind = this.checked("data");
    if (kind === "sample") return { kind: "url", url: asked("/api/sample.npz", this.secret, { device: this.field("id").value }) };
    if (kind === "file") {
      const file = this.field("file").files?.[0];
      if (!file) throw new Error("Choose the file of arrays to train on.");
      return { kind: "npz", bytes: await file.arrayBuffer() };
    }
    const photos = this.photos.length ? this.photos : await kept(federation);
    if (photos.length === 0) throw new Error("Choose photos to train on: a folder of folders, or those of a class.");
    const strange = unknown(photos, classes);
    if (strange.length) throw new Error(`The model has no class ${strange.join(", ")}; it has ${classes.join(", ")}.`);
    if (this.photos.length) await keep(federation, photos).catch(() => undefined); // then it is a new pick next time
    return { kind: "photos", photos };
  }

  // -- what is shown ---------------------------------------------------------------------------------------------

  private describe(): void {
    element("federation").textContent = this.offer.federation;
    element("model").textContent = `Train ${this.offer.model || "a model"} together with others. Your data stay on this device.`;
    element("login").hidden = !this.offer.login;
    const classes = this.offer.classes.map((name) => Object.assign(document.createElement("option"), { value: name }));
    element("classes").replaceChildren(...classes);
    this.field("threads").disabled = !globalThis.crossOriginIsolated;
    if (!("webkitdirectory" in HTMLInputElement.prototype)) element("folder").hidden = true;
  }

  private showTiers(): void {
    const { tiers } = this.offer;
    const wanted = tiers.find((tier) => tier.name === this.choices?.tier) ?? tiers.at(-1);
    const box = element("tiers");
    box.hidden = tiers.length < 2;
    for (const tier of tiers) {
      const [label, radio] = [document.createElement("label"), document.createElement("input")];
      Object.assign(radio, { type: "radio", name: "tier", value: tier.name, checked: tier === wanted });
      radio.addEventListener("change", () => {
        this.field("id").value = renamed(this.field("id").value, tiers, tier);
      });
      label.append(radio, ` ${tier.name}`);
      box.append(label);
    }
  }

  private showData(): void {
    const { samples, photos } = this.offer;
    element("sample").hidden = samples === 0;
    element("sample").querySelector("span")!.textContent = `The sample: ${samples} rows of the federation's own data`;
    element("photos").hidden = !photos;
    const radios = [...this.form.querySelectorAll<HTMLInputElement>("[name=data]")];
    const usable = radios.filter((radio) => !radio.closest("label")!.hidden);
    const wanted = usable.find((radio) => radio.value === this.choices?.data) ?? usable[0];
    if (wanted) wanted.checked = true;
    for (const radio of radios) radio.addEventListener("change", () => this.showPicks());
    this.field("folder").addEventListener("change", () => this.pickFolder());
    this.field("some").addEventListener("change", () => this.pickClass());
    this.showPicks();
  }

  private showPicks(): void {
    const kind = this.checked("data");
    element("own-photos").hidden = kind !== "photos";
    this.field("file").hidden = kind !== "file";
    if (kind === "photos" && this.photos.length === 0)
      void kept(this.offer.federation).then((photos) => this.tell(photos, photos.length ? "kept from last time: " : ""));
  }

  private pickFolder(): void {
    const { photos, skipped } = fromFolder(this.field("folder").files ?? []);
    this.photos = photos;
    this.tell(photos, "", skipped ? `; ${skipped} files are no images in a folder of a class` : "");
  }

  private pickClass(): void {
    const label = this.field("label").value.trim();
    if (label === "") return problem("Write the class of these photos first.");
    problem("");
    this.photos = [...this.photos, ...ofClass(this.field("some").files ?? [], label)];
    this.field("some").value = "";
    this.tell(this.photos);
  }

  private tell(photos: Photo[], before = "", behind = ""): void {
    element("picked").textContent = photos.length || behind ? before + counted(photos) + behind : "";
  }

  private fill(): void {
    const { choices } = this;
    if (choices === null) return;
    this.field("threads").value = String(choices.threads);
    this.field("hidden").checked = choices.pauseHidden;
  }

  // -- fields ----------------------------------------------------------------------------------------------------

  private tier() {
    return this.offer.tiers.find((tier) => tier.name === this.checked("tier")) ?? this.offer.tiers.at(-1);
  }

  private checked(name: string): string {
    return this.form.querySelector<HTMLInputElement>(`[name=${name}]:checked`)?.value ?? "";
  }

  private field(name: string): HTMLInputElement {
    return this.form.querySelector<HTMLInputElement>(`input[name=${name}]`)!;
  }
}
