// Packing and unpacking of one instruction set.
#include "pack_kernels.h"
#include "vec/vec.h"

namespace headrace::HEADRACE_ISA {

#include "pack.inl"

static uint8_t read(const uint8_t* data, int64_t bytes) {
    U8v x = {}, y = {};
    for (int64_t i = 0; i < bytes; i += 1024) {
        for (int line = 0; line < 1024; line += 64) prefetch(data + i + 8192 + line);
        for (int at = 0; at < 1024; at += 8 * kLanes) {
            x = x ^ load_u8(data + i + at);
            y = y ^ load_u8(data + i + at + 4 * kLanes);
        }
    }
    x = x ^ y;
    uint8_t all = 0;
    for (int i = 0; i < 4 * kLanes; ++i) all ^= x[i];
    return all;
}

extern const PackKernels pack_kernels;
const PackKernels pack_kernels = {pack, unpack, read};

}  // namespace headrace::HEADRACE_ISA
