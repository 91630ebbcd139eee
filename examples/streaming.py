"""Text as it comes, and stopping early: python examples/streaming.py [MODEL]"""

import sys

from headrace import LLM, RequestOutput, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model, max_model_len=1024, max_num_seqs=1)
    prompt = llm.render([{"role": "user", "content": "Tell me about rivers. 请也用中文说一句。"}])

    # Each delta is final text: half a Chinese character or half a stop string is held back until it is whole.
    outputs: list[RequestOutput] = []
    for delta in llm.stream(prompt, SamplingParams.creative(max_tokens=16, seed=3, stop=["\n\n"]), output=outputs):
        print(delta.text, end="", flush=True)
    times = outputs[0].metrics
    print(f"\n[{outputs[0].outputs[0].finish_reason}; first token after {times.first_token - times.arrival:.2f} s]")

    # Leaving the loop ends the request; its memory comes back at once.
    words = 0
    for delta in llm.stream(prompt, SamplingParams(max_tokens=200, seed=4)):
        print(delta.text, end="", flush=True)
        words += delta.text.count(" ")
        if words >= 5:
            break
    print(" [enough]")


if __name__ == "__main__":
    main(*sys.argv[1:])
