"""WAV files of spoken keywords for the devices of this example, and held-out speakers for its server.

    python make_data.py                                   # speech made by a formant synthesiser, here
    python make_data.py --speech-commands speech_commands # recordings: a folder for each word, SPEAKER_nohash_0.wav in it

Either way ``data/devices/strong-0/yes/ann_nohash_0.wav`` and so on are what devices hold, each device other speakers, and
``data/held-out.npz`` has the speakers that no device knows.
"""

import argparse
import shutil
import tomllib
import wave
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import edgefl

HERE = Path(__file__).parent
RATE = 16_000
HELD_OUT = 4  # speakers

# Formants in Hz of the sounds of speech, as they come; the third is where a hiss is loudest.
SOUNDS = {
    "a": (750, 1200, 2500), "e": (550, 1800, 2500), "i": (300, 2250, 3000), "o": (500, 900, 2400), "u": (320, 800, 2200),
    "y": (280, 2200, 3000), "n": (250, 1400, 2300), "l": (360, 1100, 2600), "r": (350, 1100, 1600), "g": (280, 1500, 2200),
    "s": (300, 1700, 6000), "f": (300, 1400, 7000), "t": (300, 1800, 4500), "d": (300, 1700, 3500), "p": (300, 900, 1500),
}  # fmt: skip
# A word is made of (seconds, voice, hiss, from which sound to which): how loud the buzz of the vocal folds is, shaped by the
# formants, and how loud the hiss.
WORDS = {
    "yes": [(0.08, 0.8, 0, "ye"), (0.13, 1, 0, "e"), (0.17, 0, 0.7, "s")],
    "no": [(0.10, 0.5, 0, "n"), (0.13, 1, 0, "o"), (0.10, 0.8, 0, "ou")],
    "up": [(0.15, 1, 0, "a"), (0.06, 0, 0, "p"), (0.05, 0, 0.4, "p")],
    "down": [(0.04, 0.3, 0.3, "d"), (0.12, 1, 0, "a"), (0.10, 0.9, 0, "au"), (0.12, 0.5, 0, "n")],
    "left": [(0.08, 0.6, 0, "l"), (0.13, 1, 0, "e"), (0.09, 0, 0.5, "f"), (0.05, 0, 0.8, "t")],
    "right": [(0.09, 0.7, 0, "r"), (0.12, 1, 0, "a"), (0.09, 0.9, 0, "ai"), (0.06, 0, 0.7, "t")],
    "stop": [(0.13, 0, 0.7, "s"), (0.05, 0, 0.6, "t"), (0.13, 1, 0, "a"), (0.06, 0, 0.3, "p")],
    "go": [(0.05, 0.4, 0.2, "g"), (0.15, 1, 0, "o"), (0.13, 0.8, 0, "ou")],
}


def spoken(word: str, speaker: dict[str, float], random: np.random.Generator) -> np.ndarray:
    """One second, float64 in [-1, 1]: ``word`` as ``speaker`` says it this time."""
    tempo = speaker["tempo"] * random.uniform(0.85, 1.15)
    counts = [int(seconds * tempo * RATE) for seconds, _, _, _ in WORDS[word]]
    formants = np.concatenate(
        [
            np.linspace(SOUNDS[sounds[0]], SOUNDS[sounds[-1]], count)
            for count, (_, _, _, sounds) in zip(counts, WORDS[word], strict=True)
        ]
    )
    formants *= speaker["tract"] * random.uniform(0.95, 1.05, 3)
    smooth = np.hanning(400) / np.hanning(400).sum()  # 25 ms from one sound to the next
    voice, hiss = (
        np.convolve(np.repeat([part[source] for part in WORDS[word]], counts), smooth, "same")
        for source in (1, 2)
    )
    said = voice * buzz(formants, speaker["pitch"] * random.uniform(0.9, 1.1), random)
    said += hiss * noise_around(formants[:, 2], random)
    said += speaker["breath"] * voice * random.normal(size=len(said))
    start = random.integers(0, RATE - len(said))
    heard = np.zeros(RATE)
    heard[start : start + len(said)] = said / np.abs(said).max() * random.uniform(0.3, 0.8)
    return np.clip(heard + random.uniform(0.003, 0.03) * random.normal(size=RATE), -1, 1)


def buzz(formants: np.ndarray, pitch: float, random: np.random.Generator) -> np.ndarray:
    """Harmonics of a falling pitch, each as loud as the formants (n, 3) near it allow."""
    falling = pitch * np.linspace(1.1, random.uniform(0.75, 0.95), len(formants))
    phase = 2 * np.pi * np.cumsum(falling) / RATE
    total = np.zeros(len(formants))
    for harmonic in range(1, int(3800 / pitch)):
        frequency = harmonic * falling
        loud = sum(1 / (1 + ((frequency - formants[:, of]) / (80 + 50 * of)) ** 2) for of in range(3))
        total += loud / harmonic**0.5 * np.sin(harmonic * phase)
    return total


def noise_around(centre: np.ndarray, random: np.random.Generator, block: int = 256) -> np.ndarray:
    """Noise in a band around ``centre`` (n,) Hz, made block by block."""
    centres = centre[::block, None]
    spectrum = np.fft.rfft(random.normal(size=(len(centres), block)))
    distance = (np.fft.rfftfreq(block, 1 / RATE) - centres) / (0.25 * centres)
    return 2 * np.fft.irfft(spectrum * np.exp(-(distance**2)), block).ravel()[: len(centre)]


def synthesise(folder: Path, speakers: int, takes: int) -> None:
    """``takes`` of every word by every speaker, laid out as Speech Commands is."""
    for number in range(speakers):
        random = np.random.default_rng([7, number])
        speaker = {
            "pitch": random.uniform(85, 240),
            "tract": random.uniform(0.87, 1.18),
            "tempo": random.uniform(0.8, 1.3),
            "breath": random.uniform(0.0, 0.15),
        }
        for word in WORDS:
            for take in range(takes):
                write(folder / word / f"speaker{number:02}_nohash_{take}.wav", spoken(word, speaker, random))


def write(path: Path, samples: np.ndarray) -> None:
    """16 bits, one channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def read(path: Path, length: int) -> np.ndarray:
    """float32 (length,), silence behind what is shorter."""
    with wave.open(str(path), "rb") as file:
        heard = np.frombuffer(file.readframes(length), "<i2").astype(np.float32) / 32768
    return np.pad(heard, (0, length - len(heard)))


def deal(source: Path, target: Path, federation: dict, speakers: int) -> None:
    """The speakers with the most recordings of ``source``: some are held out, the others dealt to the devices in turn."""
    clips = defaultdict(list)
    for word in WORDS:
        for path in sorted((source / word).glob("*.wav")):
            clips[path.name.partition("_")[0]].append(path)
    chosen = sorted(clips, key=lambda speaker: (-len(clips[speaker]), speaker))[:speakers]
    devices = [
        f"{tier}-{number}" for tier, table in federation["tiers"].items() for number in range(table["count"])
    ]
    if len(chosen) < len(devices) + HELD_OUT:
        raise SystemExit(f"{source} has {len(chosen)} speakers of {', '.join(WORDS)}: too few")
    for place, speaker in enumerate(chosen[HELD_OUT:]):
        for path in clips[speaker]:
            copy = target / "devices" / devices[place % len(devices)] / path.parent.name / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    hold_out(
        [path for speaker in chosen[:HELD_OUT] for path in clips[speaker]],
        target,
        federation["data"]["reader"],
    )


def hold_out(paths: list[Path], target: Path, reader: dict) -> None:
    """The server's samples: features made as the devices make theirs."""
    features = edgefl.models.LogMel(**{key: value for key, value in reader.items() if key != "kind"})
    waves = np.stack([read(path, reader["length"]) for path in paths])
    with torch.no_grad():
        x = np.concatenate([features(part).numpy() for part in torch.from_numpy(waves).split(64)])
    names = tuple(WORDS)
    y = np.array([names.index(path.parent.name) for path in paths])
    edgefl.data.Dataset.of(x[:0], y[:0], x, y, name="keywords", names=names).save(target / "held-out.npz")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speech-commands", type=Path, help="folder of recordings, in place of made ones")
    parser.add_argument("--speakers", type=int, default=16, help=f"of whom {HELD_OUT} are held out")
    parser.add_argument(
        "--takes", type=int, default=10, help="of each word by each speaker, where speech is made"
    )
    parser.add_argument("--out", type=Path, default=HERE / "data")
    chosen = parser.parse_args(arguments)
    federation = tomllib.loads((HERE / "federation.toml").read_text())
    source = chosen.speech_commands or chosen.out / "all"
    if chosen.speech_commands is None:
        synthesise(source, chosen.speakers, chosen.takes)
    deal(source, chosen.out, federation, chosen.speakers)
    print(f"{chosen.out}: {len(WORDS)} words, so chance is {1 / len(WORDS):.1%}")


if __name__ == "__main__":
    main()
