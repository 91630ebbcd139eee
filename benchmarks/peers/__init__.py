"""Headrace compared with other engines: llama.cpp, ONNX Runtime GenAI, OpenVINO GenAI, vLLM."""
