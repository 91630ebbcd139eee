"""Known architectures that are not supported, by what Headrace lacks for them. Names of config.json and of GGUF files."""

EXPERTS = "layers of experts"
STATE = "layers with a state (state-space, convolution, linear attention)"
LATENT = "attention with latent keys and values"
SPARSE = "learned sparse attention"
INPUTS = "inputs for each layer and a norm of values"
IMAGES = "its images; take the text model's GGUF file"

MISSING: dict[str, tuple[str, ...]] = {
    EXPERTS: (
        *("mixtral", "qwen2_moe", "qwen2moe", "qwen3_moe", "qwen3moe", "olmoe", "gpt_oss", "gpt-oss", "phimoe", "dbrx"),
        *("granitemoe", "granitemoeshared", "ernie4_5_moe", "ernie4_5-moe", "glm4_moe", "glm4moe", "exaone_moe"),
        *("llama4", "minimax", "minimax_m2", "minimax-m2", "hunyuan_v1_moe", "hunyuan-moe", "bailing_moe"),
    ),
    STATE: (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "jamba", "bamba", "zamba2", "falcon_h1"),
        *("falcon-h1", "granitemoehybrid", "granitehybrid", "nemotron_h", "qwen3_next", "qwen3next", "qwen3_5_text"),
        *("qwen35", "qwen3_5_moe_text", "qwen35moe", "lfm2", "lfm2_moe", "lfm2moe", "lfm3", "kimi_linear", "kimi-linear"),
        *("olmo_hybrid", "recurrent_gemma"),
    ),
    LATENT: ("deepseek_v2", "deepseek2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3"),
    SPARSE: ("deepseek_v32", "deepseek_v4", "deepseek4", "glm_moe_dsa", "glm-dsa", "qwen4_exp"),
    INPUTS: ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    IMAGES: ("gemma3", "mistral3", "mllama", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "phi4_multimodal"),
}


def missing(architecture: str) -> str | None:
    """What Headrace lacks for a known architecture, None for an unknown one."""
    return next((lack for lack, names in MISSING.items() if architecture in names), None)
