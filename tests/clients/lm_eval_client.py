"""lm-eval `local-completions`: log-likelihoods with echo and generation until a stop string."""

from checks import SMALL, URL, main
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model=SMALL, base_url=f"{URL}/completions", tokenizer_backend="remote", num_concurrent=1, max_retries=1, max_length=512
    )


def request(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def loglikelihood() -> None:
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " banana")]
    (paris, _), (banana, greedy) = model().loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    assert banana < paris < 0
    assert greedy is False


def generate_until() -> None:
    (text,) = model().generate_until([request("generate_until", "One, two, three,", {"until": ["."], "max_gen_toks": 16})])
    assert text
    assert "." not in text


main(loglikelihood, generate_until)
