// Attention kernels of one instruction set; attention/kernels.h describes each.
#include "attention/attention.inl"

namespace headrace::HEADRACE_ISA {

static void write(const KVShape& kv, uint8_t* page, int slot, const float* k, const float* v, float* scratch) {
    prepare_head(k, kv, nullptr, 0.0f, {}, 0, scratch);
    prepare_head(v, kv, nullptr, 0.0f, {}, 0, scratch + kv.padded);
    if (!keeps(kv, scratch + kv.padded)) poison(kv, scratch, scratch + kv.padded);
    write_token(kv, page, slot, scratch, scratch + kv.padded, (uint8_t*)(scratch + 2 * kv.padded));
}

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {append, attend, merge, copy_token, write, read_token};

}  // namespace headrace::HEADRACE_ISA
