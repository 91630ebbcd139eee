from headrace.data.outputs import CompletionOutput as CompletionOutput
from headrace.data.outputs import RequestOutput as RequestOutput
from headrace.data.params import BeamSearchParams as BeamSearchParams
from headrace.data.params import RefineParams as RefineParams
from headrace.data.params import SamplingParams as SamplingParams
from headrace.llm import LLM as LLM
from headrace.server.engines.async_llm import AsyncLLM as AsyncLLM

__version__: str
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RefineParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
