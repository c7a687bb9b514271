"""CSV files of six activities for the devices of this example, and held-out people for its server.

    python make_data.py               # people made up here: gaits, postures, how the phone is carried, noise, drift
    python make_data.py --people DIR  # your own: a CSV for each person, 50 rows a second, with the columns of these

Either way ``data/devices/strong-0/person04.csv`` and so on are what devices hold, each device other people, and
``data/held-out.npz`` has the people whom no device knows. Columns: ax, ay, az in m/s^2, gx, gy, gz in rad/s, and activity.
"""

import argparse
import csv
import shutil
import tomllib
from pathlib import Path

import numpy as np

import edgefl

HERE = Path(__file__).parent
RATE, GRAVITY = 50, 9.81
HELD_OUT = 4  # people
ACTIVITIES = ("walking", "running", "stairs", "sitting", "standing", "lying")

# Of an activity: steps a second, how hard they land in m/s^2, how far the body turns in rad/s, and how it is tilted, in
# degrees from upright.
MOTION = {
    "walking": (1.8, 3.0, 0.8, 5),
    "running": (2.7, 9.0, 1.8, 12),
    "stairs": (1.3, 3.2, 1.5, 22),
    "sitting": (0.25, 0.06, 0.03, 48),
    "standing": (0.35, 0.10, 0.06, 3),
    "lying": (0.25, 0.04, 0.02, 88),
}


def turn(degrees: np.ndarray) -> np.ndarray:
    """The rotation (3, 3) by these angles around x, y and z."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    around_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    around_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    return np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]]) @ around_y @ around_x


def felt(
    activity: str, person: dict[str, np.ndarray], seconds: int, random: np.random.Generator
) -> np.ndarray:
    """What the phone measures in a bout of ``activity``, (rows, 6)."""
    pace, impact, swing, tilt = MOTION[activity]
    rows = seconds * RATE
    # No two steps take equally long.
    paces = pace * person["pace"] * random.uniform(0.9, 1.1) * (1 + 0.05 * random.normal(size=rows))
    phase = 2 * np.pi * (np.cumsum(paces) / RATE + random.uniform())
    strength = impact * person["strength"] * random.uniform(0.75, 1.25)
    bounce = strength * sum(
        person["shape"][k] * np.sin((k + 1) * phase + person["phase"][k]) for k in range(3)
    )
    sway = 0.4 * strength * np.sin(phase / 2 + person["phase"][0])
    push = 0.5 * strength * np.sin(phase + person["phase"][1])
    if activity == "stairs":  # every other step lifts the body
        bounce += 0.5 * strength * np.abs(np.sin(phase / 2))
    turned = swing * person["strength"] * random.uniform(0.7, 1.3)
    spins = turned * np.stack(
        [np.sin(phase / 2 + person["phase"][2]), 0.7 * np.sin(phase), 0.5 * np.cos(phase / 2)]
    )
    upright = turn(np.array([tilt * random.uniform(0.85, 1.15), random.normal(0, 5), 0]))
    carried = turn(person["carried"]) @ upright
    forces = carried @ np.stack([sway, push, GRAVITY + bounce])
    return np.concatenate([forces, carried @ spins]).T


def recording(number: int, seconds: int) -> list[list[object]]:
    """Rows of a person's CSV: every activity for ``seconds``, in an order of their own."""
    random = np.random.default_rng([11, number])
    person = {
        "pace": random.uniform(0.85, 1.15),
        "strength": random.uniform(0.7, 1.3),
        "shape": np.array([1.0, random.uniform(0.3, 0.7), random.uniform(0.1, 0.3)]),
        "phase": random.uniform(0, 2 * np.pi, 3),
        "carried": random.normal(0, 9, 3),  # degrees
    }
    order = random.permutation(ACTIVITIES)
    measured = np.concatenate([felt(activity, person, seconds, random) for activity in order])
    spread = np.repeat([0.25, 0.05], 3)  # of accelerometer and gyroscope
    drift = np.cumsum(random.normal(size=measured.shape), axis=0) / len(measured) ** 0.5
    measured += spread * (random.normal(size=measured.shape) + drift)
    names = np.repeat(order, seconds * RATE)
    return [[*np.round(row, 3), name] for row, name in zip(measured.tolist(), names, strict=True)]


def make_people(folder: Path, people: int, seconds: int, reader: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(people):
        with (folder / f"person{number:02}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*reader["columns"], reader["label"]])
            writer.writerows(recording(number, seconds))


def deal(source: Path, target: Path, federation: dict) -> None:
    """The first people are held out, the others dealt to the devices in turn."""
    people = sorted(source.glob("*.csv"))
    devices = [
        f"{tier}-{number}" for tier, table in federation["tiers"].items() for number in range(table["count"])
    ]
    if len(people) < len(devices) + HELD_OUT:
        raise SystemExit(
            f"{source} has {len(people)} CSV files, one for each person: too few for {len(devices)} devices"
        )
    for place, path in enumerate(people[HELD_OUT:]):
        copy = target / "devices" / devices[place % len(devices)] / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    hold_out(people[:HELD_OUT], target, federation["data"]["reader"])


def hold_out(paths: list[Path], target: Path, reader: dict) -> None:
    """The server's samples: windows cut and scaled as the devices cut and scale theirs."""
    x, y = [], []
    for path in paths:
        with path.open(newline="") as file:
            records = list(csv.DictReader(file))
        rows = np.array([[float(record[column]) for column in reader["columns"]] for record in records])
        rows = (rows - reader["mean"]) / reader["deviation"]
        labels = [ACTIVITIES.index(record[reader["label"]]) for record in records]
        for start in range(0, len(rows) - reader["window"] + 1, reader["step"]):
            part = slice(start, start + reader["window"])
            x.append(rows[part].T)
            y.append(np.bincount(labels[part]).argmax())
    x, y = np.stack(x).astype(np.float32), np.array(y)
    edgefl.data.Dataset.of(x[:0], y[:0], x, y, name="activities", names=ACTIVITIES).save(
        target / "held-out.npz"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--people", type=Path, help="folder with a CSV for each person, in place of made ones"
    )
    parser.add_argument(
        "--count", type=int, default=16, help=f"people to make up, of whom {HELD_OUT} are held out"
    )
    parser.add_argument("--seconds", type=int, default=25, help="of each activity of a person who is made up")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    chosen = parser.parse_args(arguments)
    federation = tomllib.loads((HERE / "federation.toml").read_text())
    source = chosen.people or chosen.out / "all"
    if chosen.people is None:
        make_people(source, chosen.count, chosen.seconds, federation["data"]["reader"])
    deal(source, chosen.out, federation)
    print(f"{chosen.out}: {len(ACTIVITIES)} activities, so chance is {1 / len(ACTIVITIES):.1%}")


if __name__ == "__main__":
    main()
