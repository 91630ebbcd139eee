"""Voice activity: the network against torch, parts with speech, and the windows that are cut from them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from headrace.audio import vad
from headrace.audio.decode import samples_of
from headrace.audio.mel import HOP, RATE
from headrace.audio.vad import CONTEXT, FRAME, EnergyDetector, SileroDetector, chunks, clips, speech_parts
from tests.places import model_file


def weights() -> dict[str, np.ndarray]:
    """Random tensors of the shapes of silero_vad_16k.safetensors."""
    rng = np.random.default_rng(0)
    shapes = {
        "stft_conv.weight": (258, 1, 256),
        "conv1.weight": (128, 129, 3),
        "conv2.weight": (64, 128, 3),
        "conv3.weight": (64, 64, 3),
        "conv4.weight": (128, 64, 3),
        "lstm_cell.weight_ih": (512, 128),
        "lstm_cell.weight_hh": (512, 128),
        "final_conv.weight": (1, 128, 1),
    }
    made = {name: (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32) for name, shape in shapes.items()}
    for name, size in (("conv1", 128), ("conv2", 64), ("conv3", 64), ("conv4", 128), ("final_conv", 1)):
        made[f"{name}.bias"] = rng.standard_normal(size).astype(np.float32) * 0.1
    return made | {f"lstm_cell.bias_{side}": rng.standard_normal(512).astype(np.float32) * 0.1 for side in ("ih", "hh")}


def reference(tensors: Mapping[str, np.ndarray], samples: np.ndarray) -> np.ndarray:
    """Probabilities frame by frame, in torch."""
    w = {name: torch.from_numpy(value) for name, value in tensors.items()}
    cell = torch.nn.LSTMCell(128, 128)
    cell.load_state_dict({name.removeprefix("lstm_cell."): value for name, value in w.items() if name.startswith("lstm")})
    padded = torch.zeros(CONTEXT + -(-len(samples) // FRAME) * FRAME)
    padded[CONTEXT : CONTEXT + len(samples)] = torch.from_numpy(samples)
    state: Any = None
    found = []
    for start in range(0, len(padded) - CONTEXT, FRAME):
        x = functional.pad(padded[None, None, start : start + CONTEXT + FRAME], (0, 64), "reflect")
        spectrum = functional.conv1d(x, w["stft_conv.weight"], stride=128)
        x = (spectrum[:, :129] ** 2 + spectrum[:, 129:] ** 2).sqrt()
        for at, stride in ((1, 1), (2, 2), (3, 2), (4, 1)):
            x = functional.conv1d(x, w[f"conv{at}.weight"], w[f"conv{at}.bias"], stride=stride, padding=1).relu()
        state = cell(x[:, :, 0], state)
        found.append(
            float(functional.conv1d(state[0][..., None].relu(), w["final_conv.weight"], w["final_conv.bias"]).sigmoid())
        )
    return np.array(found)


def sound(seconds: float = 1.3) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(int(seconds * RATE)) * 0.3).astype(np.float32)


def test_the_network_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        expected = reference(weights(), sound())
    monkeypatch.setattr(vad, "FRAMES_AT_ONCE", 16)  # several blocks
    ours = SileroDetector(weights()).probabilities(sound())
    assert ours.shape == expected.shape
    assert np.ptp(expected) > 1e-3
    assert np.abs(ours - expected).max() < 1e-4
    alone = [SileroDetector(weights()).probabilities(sound()[at : at + FRAME]) for at in range(0, len(sound()), FRAME)]
    forgets = np.concatenate(alone)
    assert np.abs(forgets - expected).max() > 1e-3  # the state of the frames before counts


ONNX_NAMES = {  # of the tensors, by the ends of their names in the ONNX file
    "stft_conv.weight": "stft.forward_basis_buffer",
    **{f"conv{at + 1}.{part}": f"encoder.{at}.reparam_conv.{part}" for at in range(4) for part in ("weight", "bias")},
    **{f"lstm_cell.{part}_{side}": f"decoder.rnn.{part}_{side}" for part in ("weight", "bias") for side in ("ih", "hh")},
    **{f"final_conv.{part}": f"decoder.decoder.2.{part}" for part in ("weight", "bias")},
}


@pytest.mark.peers
@pytest.mark.weights
def test_the_network_equals_onnxruntime() -> None:
    """With the weights of the package's ONNX file, on speech, silence and noise.

    The package's safetensors file has tensors of the same shapes from another training, so its probabilities differ.
    """
    onnx: Any = pytest.importorskip("onnx")
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    path = str(model_file("silero_vad_16k_op15.onnx"))
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    tensors = {ours: next(value for name, value in stored.items() if name.endswith(end)) for ours, end in ONNX_NAMES.items()}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    speech = samples_of(model_file("speech.wav"))[:]
    samples = np.concatenate([speech, np.zeros(2 * RATE, np.float32), sound(2.0), speech[: 5 * RATE + 77]])

    def original(carry: bool = True) -> np.ndarray:
        """Probabilities by onnxruntime. carry: each frame receives the state of the frame before."""
        padded = np.zeros((1, CONTEXT + -(-len(samples) // FRAME) * FRAME), np.float32)
        padded[0, CONTEXT : CONTEXT + len(samples)] = samples
        state, found = np.zeros((2, 1, 128), np.float32), []
        for start in range(0, padded.shape[1] - CONTEXT, FRAME):
            frame = {"input": padded[:, start : start + CONTEXT + FRAME], "state": state, "sr": np.array(RATE)}
            probability, new = session.run(None, frame)
            state = new if carry else state
            found.append(probability[0, 0])
        return np.array(found)

    ours, expected = SileroDetector(tensors).probabilities(samples), original()
    assert expected.min() < 0.05
    assert expected.max() > 0.95
    assert np.abs(ours - expected).max() < 1e-4
    assert speech_parts(ours, len(samples)) == speech_parts(expected, len(samples))
    assert np.abs(ours - original(carry=False)).max() > 0.1  # a control: the state is not carried on
    package = SileroDetector(load_file(model_file("silero_vad_16k.safetensors"))).probabilities(samples)
    assert np.corrcoef(package, expected)[0, 1] > 0.9


def test_levels_tell_silence_from_sound_but_never_skip_loud_sound() -> None:
    quiet, loud = np.zeros(RATE, np.float32), sound(1.0)
    found = EnergyDetector().probabilities(np.concatenate([quiet, loud, quiet]))
    assert (found[: RATE // FRAME] == 0).all()
    assert (found[RATE // FRAME + 1 : 2 * RATE // FRAME] == 1).all()
    assert (EnergyDetector().probabilities(loud) == 1).all()
    assert not EnergyDetector().probabilities(quiet).any()
    assert not len(EnergyDetector().probabilities(quiet[:0]))


def frames(*spans: tuple[float, float], seconds: float) -> np.ndarray:
    """Probabilities of 0.9 within the spans (seconds) and 0.1 around them."""
    values = np.full(int(seconds * RATE) // FRAME, 0.1, np.float32)
    for start, end in spans:
        values[int(start * RATE) // FRAME : int(end * RATE) // FRAME] = 0.9
    return values


def seconds_of(parts: list[tuple[int, int]]) -> list[tuple[float, float]]:
    assert all(edge % HOP == 0 for part in parts for edge in part)
    return [(round(start / RATE, 1), round(end / RATE, 1)) for start, end in parts]


def test_parts_have_pads_and_short_pauses() -> None:
    values = frames((1.0, 2.0), (2.1, 3.0), (5.0, 6.0), seconds=10.0)
    assert seconds_of(speech_parts(values, 10 * RATE)) == [(0.6, 3.4), (4.6, 6.4)]
    assert seconds_of(speech_parts(frames((0.0, 1.0), (1.5, 2.0), seconds=2.0), 2 * RATE)) == [(0.0, 2.0)]
    assert speech_parts(frames(seconds=3.0), 3 * RATE) == []
    values[int(3.0 * RATE) // FRAME : int(5.0 * RATE) // FRAME] = 0.4  # not speech, but not the end of it
    assert seconds_of(speech_parts(values, 10 * RATE)) == [(0.6, 6.4)]


def test_windows_keep_short_silences_and_cut_long_speech() -> None:
    def samples(*spans: tuple[float, float]) -> list[tuple[int, int]]:
        return [(int(start * RATE), int(end * RATE)) for start, end in spans]

    parts = samples((0, 10), (11.5, 15), (17.5, 25), (26, 32))
    assert seconds_of(clips(parts)) == [(0, 15), (17.5, 32)]
    none = np.zeros(100 * RATE // FRAME, np.float32)
    assert seconds_of(chunks(parts, none)) == [(0, 25), (26, 32)]
    assert seconds_of(chunks(samples((0, 5), (8.5, 12)), none)) == [(0, 5), (8.5, 12)]
    likely = np.ones_like(none)
    likely[int(25.0 * RATE) // FRAME] = 0.2
    cut = seconds_of(chunks(samples((0, 50)), likely))
    assert cut == [(0, 25.0), (25.0, 50)]
    assert all(
        end - start <= 30 for start, end in seconds_of(chunks(samples((0, 100)), np.ones(200 * RATE // FRAME, np.float32)))
    )
