"""Many prompts at once: python examples/offline_batch.py [MODEL]

The engine batches them by itself; what prompts have in common is computed once.
"""

import sys

from headrace import LLM, SamplingParams

QUESTIONS = ["What does a water wheel do?", "Name a river in China.", "What is 7 times 8?"]


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model, max_model_len=1024)

    # `generate` continues texts as they are; one set of parameters for all, or one each.
    texts = ["The capital of France is", "Water flows"]
    for output in llm.generate(texts, SamplingParams(temperature=0, max_tokens=8)):
        print(f"{output.prompt} …{output.outputs[0].text!r}")

    # `chat` puts conversations through the model's template; n asks for several answers.
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(talks, SamplingParams.balanced(max_tokens=12, n=2, seed=1)), strict=True):
        print(f"\n{question} ({len(output.prompt_token_ids)} tokens, {output.metrics.cached_tokens} from the cache)")
        for answer in output.outputs:
            print(f"  {answer.index}: {answer.text!r} ({answer.finish_reason})")

    # `score` says how likely a text is.
    for score in llm.score(["The cat sat on the mat.", "Mat the on sat cat the."]):
        print(f"\nperplexity {score.perplexity:.1f} over {len(score.logprobs)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
