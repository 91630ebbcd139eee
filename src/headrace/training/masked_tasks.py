"""Small tasks for models that fill in blocks: letters reversed, numbers in words, or runs of a text file."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MASK, END, UNKNOWN = "<mask>", "<end>", "<unknown>"
# Token ids 0, 1, 2.
SPECIAL = (MASK, END, UNKNOWN)
LETTERS = "abcdefghijkl"
ONES = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
# Vocabulary size of a text file's tokenizer.
VOCABULARY = 512


class Task:
    """A source of prompts with answers. sizes: possible lengths of a prompt in tokens. longest: most tokens of an answer."""

    tokenizer: Tokenizer
    sizes: tuple[int, ...]
    longest: int

    def pair(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        """Draw a prompt of `size` tokens and an answer to it, without an end token."""
        raise NotImplementedError

    def answers(self, prompt: str) -> list[str]:
        """Return all right answers; empty if they are not known."""
        return []

    def id_of(self, name: str) -> int:
        """Return the token id of a special token."""
        return int(self.tokenizer.token_to_id(name) or 0)

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary and of one drawn pair of each size."""
        rng = random.Random(0)
        data = json.dumps([self.tokenizer.to_str(), self.longest, [self.pair(rng, size) for size in self.sizes]])
        return hashlib.sha256(data.encode()).hexdigest()[:16]


def words_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with one token for each of these words, split at spaces."""
    names = [*SPECIAL, *(f"▁{word}" for word in words)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


class Reverse(Task):
    """Letters with "=" at the end; the answer is the letters in reverse order."""

    sizes = tuple(range(4, 9))
    longest = 7

    def __init__(self) -> None:
        self.tokenizer = words_tokenizer([*LETTERS, "="])

    def pair(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        letters = rng.choices(LETTERS, k=size - 1)
        return self._ids([*letters, "="]), self._ids(letters[::-1])

    def answers(self, prompt: str) -> list[str]:
        return [" ".join(prompt.split()[-2::-1])]

    def _ids(self, words: Sequence[str]) -> list[int]:
        ids: list[int] = self.tokenizer.encode(" ".join(words)).ids
        return ids


class Numbers(Task):
    """A number in digits, to be written in words: "forty seven" and "seven and forty" are both right.

    A mix of both is wrong, so tokens predicted independently of each other fail: the multimodality problem.
    digits: 3 at most.

    Source: Gu et al., "Non-Autoregressive Neural Machine Translation", arXiv 1711.02281.
    """

    def __init__(self, digits: int = 3) -> None:
        self.sizes = tuple(range(2, digits + 2))
        self.longest = 5 if digits == 3 else 3
        self.tokenizer = words_tokenizer([*"0123456789", "=", *ONES, *TEENS, *TENS, "hundred", "and"])

    def pair(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        number = rng.randrange(10 ** (size - 2), 10 ** (size - 1))
        prompt = " ".join([*str(number), "="])
        return self.tokenizer.encode(prompt).ids, self.tokenizer.encode(rng.choice(self.answers(prompt))).ids

    def answers(self, prompt: str) -> list[str]:
        number = int("".join(prompt.split()[:-1]))
        hundreds, rest = divmod(number, 100)
        head = [ONES[hundreds - 1], "hundred"] if hundreds else []
        return [" ".join([*head, *tail]) for tail in _below_hundred(rest)]


def _below_hundred(number: int) -> list[list[str]]:
    tens, ones = divmod(number, 10)
    if number < 20:
        return [[] if number == 0 else [(ONES + TEENS)[number - 1]]]
    if ones == 0:
        return [[TENS[tens - 2]]]
    return [[TENS[tens - 2], ONES[ones - 1]], [ONES[ones - 1], "and", TENS[tens - 2]]]


class TextFile(Task):
    """Runs of a text file, with a BPE vocabulary trained on it. The answer continues the prompt."""

    sizes = (4, 8, 16)
    longest = 31

    def __init__(self, path: Path) -> None:
        text = path.read_text("utf-8")
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=letters, show_progress=False
        )
        self.tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        self.ids: list[int] = self.tokenizer.encode(text).ids
        if len(self.ids) < 1000:
            raise ValueError(f"{path} has {len(self.ids)} tokens; a text to learn from needs 1000 at least")

    def pair(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        start = rng.randrange(len(self.ids) - size - self.longest)
        return self.ids[start : start + size], self.ids[start + size : start + size + self.longest]


TASKS: dict[str, Callable[[], Task]] = {"reverse": Reverse, "numbers": Numbers}


def task_named(name: str) -> Task:
    """Return the task of that name, or of the text file at that path. Raises ValueError."""
    if name in TASKS:
        return TASKS[name]()
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a task ({', '.join(TASKS)}) nor a text file")
    try:
        return TextFile(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read as text ({error}); give another file") from None
