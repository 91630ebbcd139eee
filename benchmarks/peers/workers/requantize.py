"""Rewrites a GGUF file with its matrices as Q8_0, for engines that do not read every type; the rest is copied.

python requantize.py FROM TO, in an environment with `gguf`.
"""

import sys
from typing import Any

import gguf
import numpy as np

KIND = gguf.GGMLQuantizationType.Q8_0
STRUCTURE = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")  # the writer says these


def main(source: str, to: str) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer: Any = gguf.GGUFWriter(to, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, field in reader.fields.items():
        if not name.startswith(STRUCTURE):
            sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    rewritten = []
    for tensor in reader.tensors:
        matrix = len(tensor.shape) == 2 and tensor.tensor_type is not KIND
        rows = tuple(int(size) for size in reversed(tensor.shape))
        shape, kind = tensor.data.shape, tensor.tensor_type
        if matrix:
            shape, kind = gguf.quant_shape_to_byte_shape(rows, KIND), KIND
        rewritten.append((tensor, matrix))
        writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, int(np.prod(shape)) * tensor.data.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, matrix in rewritten:
        data = gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), KIND) if matrix else tensor.data
        writer.write_tensor_data(np.ascontiguousarray(data))
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
