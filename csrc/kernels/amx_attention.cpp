// Attention on AMX, for K/V in bfloat16. Compiled for avx512 alone.
#include "vec/vec.h"
#if HEADRACE_IS(avx512)
#include "attention/amx.inl"
#include "attention/attention.inl"

namespace headrace::avx512 {
extern const AttentionKernels attention_kernels;
}

namespace headrace::HEADRACE_ISA {

static void attend_amx(const AttentionTask& task, const AttentionItem& item, const AttentionItem* after,
                       float* scratch) {
    if (task.kv.type != KVType::kBf16) return avx512::attention_kernels.attend(task, item, after, scratch);
    attend_item<AmxBf16Pages>(task, item, after, scratch);
    tiles_release();
}

extern const AttentionKernels amxall_attention_kernels;
const AttentionKernels amxall_attention_kernels = {append, attend_amx, merge, copy_token, write_rounded, read_token};

}  // namespace headrace::HEADRACE_ISA
#endif
