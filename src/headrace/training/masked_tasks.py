"""Small tasks that a model can learn to fill blocks for: a text backwards, numbers in words, the words of a text file."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MASK, END, UNKNOWN = "<mask>", "<end>", "<unknown>"
SPECIAL = (MASK, END, UNKNOWN)  # token ids 0, 1, 2
LETTERS = "abcdefghijkl"
ONES = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
VOCABULARY = 512  # tokens of a text file's


class Task:
    """Prompts with the answers to them. `sizes`: a prompt's lengths; `longest`: of an answer. Tokens, both of them."""

    tokenizer: Tokenizer
    sizes: tuple[int, ...]
    longest: int

    def pair(self, rng: random.Random, size: int) -> tuple[list[int], list[int]]:
        """A prompt of so many tokens, and an answer to it, without an end token."""
        raise NotImplementedError

    def answers(self, prompt: str) -> list[str]:
        """The answers that are right; none where that cannot be said."""
        return []

    def id_of(self, name: str) -> int:
        """Of a special token."""
        return int(self.tokenizer.token_to_id(name) or 0)


def words_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A token for each word, which stands between spaces."""
    names = [*SPECIAL, *(f"▁{word}" for word in words)]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(list(SPECIAL))
    return made


class Reverse(Task):
    """Letters, and the same from the last to the first: one answer."""

    sizes = tuple(range(4, 9))  # with the sign at the end
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
    """A number's digits, and its words: "forty seven" and "seven and forty" are both right, and a word of the one in the other
    is wrong. So tokens that are guessed without each other do not fit (the multimodality problem of Gu et al. 2018).
    `digits`: 3 at most."""

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


class Text(Task):
    """Runs of a text file, in a vocabulary of its own."""

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
        at = rng.randrange(len(self.ids) - size - self.longest)
        return self.ids[at : at + size], self.ids[at + size : at + size + self.longest]


TASKS: dict[str, Callable[[], Task]] = {"reverse": Reverse, "numbers": Numbers}


def task_named(name: str) -> Task:
    """A task by its name, or the text file of that name. Raises ValueError."""
    if name in TASKS:
        return TASKS[name]()
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a task ({', '.join(TASKS)}) nor a text file")
    try:
        return Text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read as text ({error}); give another file") from None
