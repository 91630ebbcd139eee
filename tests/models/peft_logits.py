"""Run by an interpreter that has peft: adapters that peft writes for a folder, and its logits with each of them in float64.

usage: python -m tests.models.peft_logits FOLDER SETTINGS.json PROMPTS.json OUT   SETTINGS: arguments of LoraConfig by name
writes OUT/NAME (the adapter) and OUT/NAME.npz with one array [tokens, vocabulary] per prompt
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.zoo import FLOAT32, in_float64


def adapted(folder: Path, arguments: dict[str, Any]) -> Any:
    """The folder's model in float64 with a random adapter, whose values float32 has."""
    tensors = load_file(folder / "model.safetensors")
    with in_float64():
        base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).double()
        base.load_state_dict({name: values.double() for name, values in tensors.items()}, strict=False)
        base.tie_weights()
        model = peft.get_peft_model(base, peft.LoraConfig(**arguments, init_lora_weights=False)).double().eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.copy_(values.to(FLOAT32))
    return model


def main() -> None:
    folder, settings, prompts, out = map(Path, sys.argv[1:])
    for number, (name, arguments) in enumerate(json.loads(settings.read_text()).items()):
        torch.manual_seed(number)
        model = adapted(folder, arguments)
        model.save_pretrained(out / name)
        file = out / name / "adapter_model.safetensors"
        save_file({key: values.to(FLOAT32) for key, values in load_file(file).items()}, file, {"format": "pt"})
        with in_float64(), torch.no_grad():
            rows = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in json.loads(prompts.read_text())]
        np.savez(out / f"{name}.npz", *rows)


if __name__ == "__main__":
    main()
