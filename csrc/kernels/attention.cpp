// Attention kernels of one instruction set; attention/kernels.h describes each.
#include "attention/attention.inl"

namespace headrace::HEADRACE_ISA {

static void attend(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after, float* scratch) {
    switch (task.kv.type) {
        case KVType::kBf16:
            return attend_item<Bf16Pages>(task, item, after, scratch);
        case KVType::kInt8:
            return attend_item<Int8Pages>(task, item, after, scratch);
        case KVType::kInt4:
            return attend_item<Int4Pages>(task, item, after, scratch);
        case KVType::kF32:
            return attend_item<F32Pages>(task, item, after, scratch);
    }
}

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {append, attend, merge, copy_token, write_rounded, read_token};

}  // namespace headrace::HEADRACE_ISA
