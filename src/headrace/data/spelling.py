"""Known names close to an unknown one, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches

# Names in other engines, and the same setting's name in Headrace.
ELSEWHERE = {
    "response_format": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "do_sample": "temperature",
    "num_beams": "beam_width",
    "num_return_sequences": "n",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
}


def near(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Known names close to `name`, the nearest first; if there are none, known names that contain it."""
    lower = {one.lower(): one for one in known}
    known = list(lower.values())
    if ELSEWHERE.get(name) in known:
        return [ELSEWHERE[name]]
    if matches := get_close_matches(name.lower(), lower, n=most):
        return [lower[one] for one in matches]
    return [one for one in known if len(name) > 2 and name.lower() in one.lower()][:most]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question that offers similar names, or `otherwise` if there are none."""
    matches = near(name, known)
    return f"did you mean {' or '.join(matches)}?" if matches else otherwise
