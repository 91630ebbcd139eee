"""stories260K: a real model of 260 thousand parameters reproduces its golden greedy text."""

from headrace.weights.loader import load_model
from tests.models.feeding import greedy
from tests.models.llama2c import read_checkpoint, read_pieces
from tests.places import data_path

BOS = 1


def test_golden_text_of_200_tokens() -> None:
    folder = data_path("stories260K")
    source = read_checkpoint(folder / "stories260K.bin")
    model = load_model(source)
    layer = model.config.each_layer
    assert (layer.head_dim, layer.ffn, layer.kv_heads) == (8, 172, 4)
    tokens = greedy(model, [[BOS]], 200)[0]
    pieces = read_pieces(folder / "tok512.bin", model.config.vocab_size)
    text = b"".join(pieces[token] for token in tokens).decode(errors="replace")
    golden = (folder / "expected_greedy_200.txt").read_text()
    assert text.strip() == golden.strip()
