"""Has OpenVINO GenAI save what it makes of a GGUF file beside it: its draft models are read in that form alone.

python openvino_convert.py FILE
"""

import sys

import openvino_genai as genai

if __name__ == "__main__":
    genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
