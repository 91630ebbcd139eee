"""Run by an interpreter that has sentence-transformers: embeddings of texts, and scores of pairs, as it computes them.

usage: python -m tests.models.sentence_vectors FOLDER TEXTS.json OUT.npy [PROMPT]   embeddings [texts, width]
       python -m tests.models.sentence_vectors FOLDER PAIRS.json OUT.npy --pairs    scores [pairs]
"""

import json
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import CrossEncoder, SentenceTransformer


def main() -> None:
    folder, texts, out, *more = sys.argv[1:]
    given = json.loads(Path(texts).read_text())
    if more == ["--pairs"]:
        np.save(out, CrossEncoder(folder, device="cpu").predict([tuple(pair) for pair in given]))
    else:
        model = SentenceTransformer(folder, device="cpu")
        np.save(out, model.encode(given, prompt_name=more[0] if more else None, normalize_embeddings=True))


if __name__ == "__main__":
    main()
