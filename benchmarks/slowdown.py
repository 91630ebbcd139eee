"""Texts changed word by word against a classifier with early exits: to make it slow, and to make it wrong.

A greedy attack: in each round the change of one word, among the nearest words by the model's own embeddings, that serves the
attack best. It knows the exits' probabilities and the rule. Attacks, each on its own copy of the texts:

* slow: more layers under the rule. Next to it as many random changes from the same words (control), and the same texts under a
  cap on layers.
* wrong: another class than the label, for the full model, for the rule and for the rule with its cap, each attacked by itself.
  Only the texts that are right before are attacked; the others count as wrong. So PABEE's authors measure its defence, with
  the synonyms of TextFooler.

    python -m benchmarks.slowdown MODEL CLASSIFIER dev.jsonl --criterion patience --threshold 2 --cap 4 --texts 60 --changes 3
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.data.plan import Threshold
from headrace.llm import LLM
from headrace.models.layers import Embedding
from headrace.runner.classifier import first_exit, probabilities
from headrace.training.classifier import exit_logits, read_labelled
from headrace.weights.loader import load_model

# Probabilities [exits, texts, classes] of texts of token ids.
Scorer = Callable[[Sequence[list[int]]], np.ndarray]
# For each token the tokens that may take its place; empty for tokens that are no whole word.
Neighbours = Callable[[int], Sequence[int]]
# Criterion and threshold; an empty criterion is the full model.
Rule = tuple[str, Threshold]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exits (from 0) [texts] and predicted classes [texts] under a rule."""

    exits: np.ndarray
    classes: np.ndarray


def outcome(probs: np.ndarray, rule: Rule) -> Outcome:
    """What a rule gives for the probabilities [exits, texts, classes]."""
    exits = first_exit(*rule, probs)
    return Outcome(exits, probs.argmax(-1)[exits, np.arange(len(exits))])


def capped(rule: Rule, exits: int, cap: int) -> Rule:
    """The rule with one threshold for each exit but the last of `exits`, which stops every text at exit `cap` (from 1).

    Raises ValueError for a criterion that passes below its threshold.
    """
    criterion, threshold = rule
    if criterion not in ("max_prob", "margin", "patience"):
        raise ValueError(f"--cap: {criterion} has no threshold 0 that every text passes; use max_prob, margin or patience")
    own = threshold if isinstance(threshold, tuple) else (threshold,) * (exits - 1)
    return criterion, tuple(own[: cap - 1]) + (0.0,) * (exits - cap)


def slower(probs: np.ndarray, rule: Rule, label: int) -> np.ndarray:
    """Gain of the attack "slow" [texts]: later exits first, then exits that are less sure on average."""
    gain: np.ndarray = outcome(probs, rule).exits - probs.max(-1).mean(0)
    return gain


def wronger(probs: np.ndarray, rule: Rule, label: int) -> np.ndarray:
    """Gain of the attack "wrong" [texts]: the probability of other classes at the exit; 1 more for another answer."""
    found = outcome(probs, rule)
    gain: np.ndarray = (found.classes != label) + 1 - probs[found.exits, np.arange(len(found.exits)), label]
    return gain


def variants(text: list[int], changed: set[int], neighbours: Neighbours) -> list[tuple[int, list[int]]]:
    """All texts with one more word changed, with the place of the change."""
    return [
        (place, [*text[:place], token, *text[place + 1 :]])
        for place, old in enumerate(text)
        if place not in changed
        for token in neighbours(old)
    ]


def attack(
    text: list[int],
    label: int,
    rule: Rule,
    gain: Callable[[np.ndarray, Rule, int], np.ndarray],
    score: Scorer,
    neighbours: Neighbours,
    changes: int,
) -> list[int]:
    """The text after at most `changes` greedy changes; a round that gains nothing ends the attack."""
    best, changed = float(gain(score([text]), rule, label)[0]), set[int]()
    for _ in range(changes):
        tried = variants(text, changed, neighbours)
        if not tried:
            break
        gains = gain(score([one for _, one in tried]), rule, label)
        if not gains.max() > best:
            break
        best, (place, text) = float(gains.max()), tried[int(gains.argmax())]
        changed.add(place)
    return text


def changed_at_random(text: list[int], changes: int, neighbours: Neighbours, rng: np.random.Generator) -> list[int]:
    """The control: as many changes from the same words, drawn."""
    changed = set[int]()
    for _ in range(changes):
        if not (tried := variants(text, changed, neighbours)):
            break
        place, text = tried[int(rng.integers(len(tried)))]
        changed.add(place)
    return text


class NearWords:
    """The nearest whole words of a word by the cosine of the model's token embeddings."""

    def __init__(self, llm: LLM, count: int) -> None:
        holder = dict(load_model(llm.opened.source).holders())["tokens"]
        assert isinstance(holder, Embedding)
        table = holder.weight.float().numpy()
        texts = [llm.tokenizer.token_text(token) for token in range(len(table))]
        self._words = np.array([token for token, text in enumerate(texts) if text.isalpha() and len(text) > 2])
        self._unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9)
        self._known: dict[int, list[int]] = {}
        self._allowed, self._count = set(self._words.tolist()), count

    def __call__(self, token: int) -> list[int]:
        if token not in self._allowed:
            return []
        if token not in self._known:
            order = np.argsort(-(self._unit[self._words] @ self._unit[token]), kind="stable")
            self._known[token] = [int(self._words[at]) for at in order[: self._count + 1] if self._words[at] != token]
        return self._known[token][: self._count]


def error(values: np.ndarray) -> str:
    """Mean ± standard error."""
    return f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("classifier")
    parser.add_argument("data", type=Path, help="labelled texts that trained nothing")
    parser.add_argument("--criterion", default="patience", choices=("patience", "max_prob", "margin"))
    parser.add_argument("--threshold", type=float, default=2.0)
    parser.add_argument("--cap", type=int, default=4, help="exit (from 1) at which every text stops")
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--changes", type=int, default=3)
    parser.add_argument("--words", type=int, default=5, help="words that may take the place of one")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    with LLM(args.model, threads=args.threads, classifier=args.classifier) as llm:
        assert llm.classifier is not None
        exits = llm.classifier.exits
        drawn = read_labelled(args.data)
        chosen = np.random.default_rng(0).permutation(len(drawn.texts))[: args.texts]
        texts = [llm.tokenizer.encode(str(drawn.texts[at]), parse_special=False) for at in chosen]
        labels = [exits.labels.index(drawn.labels[at]) for at in chosen]
        layers, near = np.array(exits.layers), NearWords(llm, args.words)

        def score(batch: Sequence[list[int]]) -> np.ndarray:
            return probabilities(np.swapaxes(np.array(exit_logits(llm, list(batch))), 0, 1))  # type: ignore[arg-type]

        rule: Rule = (args.criterion, args.threshold)
        rules = {"all layers": ("", 0.0), "rule": rule, "with cap": capped(rule, len(layers), args.cap)}
        report(texts, labels, rules, layers, score, near, args.changes)


def report(
    texts: Sequence[list[int]],
    labels: Sequence[int],
    rules: dict[str, Rule],
    layers: np.ndarray,
    score: Scorer,
    near: Neighbours,
    changes: int,
) -> None:
    """Run all attacks and print their figures. rules: the full model, the rule that "slow" attacks, the rule with its cap."""
    right, rng = np.array(labels), np.random.default_rng(1)
    slow = [attack(text, label, rules["rule"], slower, score, near, changes) for text, label in zip(texts, labels, strict=True)]
    drawn = [changed_at_random(text, changes, near, rng) for text in texts]
    for name, kind in (("unchanged", texts), ("made slow", slow), ("changed at random", drawn)):
        probs = score(kind)
        for what, rule in rules.items():
            found = outcome(probs, rule)
            print(f"{name}, {what}: layers {error(layers[found.exits])}, right {error(found.classes == right)}", flush=True)
    before = score(texts)
    for what, rule in rules.items():
        was = outcome(before, rule).classes == right
        pairs = zip(texts, labels, was, strict=True)
        worst = [attack(text, label, rule, wronger, score, near, changes) if good else text for text, label, good in pairs]
        found = outcome(score(worst), rule)
        print(f"made wrong, {what}: layers {error(layers[found.exits])}, right {error(found.classes == right)}", flush=True)


if __name__ == "__main__":
    main()
