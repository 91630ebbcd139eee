// Sampling kernels of one instruction set: scans of the vocabulary. sample/kernels.h describes each.
#include "sample/kernels.h"
#include "sample/noise.inl"
#include "vec/scan.h"

namespace headrace::HEADRACE_ISA {
namespace {

#define HEADRACE_MEMBER inline __attribute__((always_inline))

constexpr float kNever = -__builtin_inff();
constexpr double kPoint = 0x1p40;
constexpr double kFar = -40.0;        // e^-40 is 0 in fixed point, even when multiplied by the logit
constexpr float kShareless = -28.5f;  // logits this far below the best have an exp of 0 in fixed point
// Adding kRound to |x| < 2^51 rounds x to an integer (nearest even) in the low bits of the sum.
constexpr double kRound = 0x1.8p52;

struct Best {
    float score;
    int32_t id;
};

HEADRACE_INLINE int least(int a, int b) { return a < b ? a : b; }

// Iterates over the blocks whose largest scaled logit is at least `least`. A short last block is padded with NaN, for
// which every comparison is false.
class Blocks {
public:
    HEADRACE_MEMBER Blocks(const LogitRow& row, float least) : row_(row), least_(least) {}
    HEADRACE_MEMBER bool next() {
        do {
            first += kVocabBlock;
            if (first >= row_.size) return false;
        } while (!(row_.maxima[first / kVocabBlock] / row_.temperature >= least_));
        seek(first);
        return true;
    }
    HEADRACE_MEMBER void seek(int id) {
        first = id;
        z = row_.z + first;
        if (first + kVocabBlock <= row_.size) return;
        for (int i = 0; i < kVocabBlock; ++i) room_[i] = first + i < row_.size ? row_.z[first + i] : __builtin_nanf("");
        z = room_;
    }

    int first = -kVocabBlock;  // id of the block's first token
    const float* z = nullptr;  // its logits, before the temperature

private:
    const LogitRow& row_;
    const float least_;
    float room_[kVocabBlock];
};

template <bool scaled>
HEADRACE_INLINE F32v logits_at(const float* z, float temperature) {
    const F32v x = load_f32(z);
    return scaled ? x / set_f32(temperature) : x;
}

bool block_maxima(const float* z, int size, float* maxima) {
    uint32_t nan = 0;
    for (int first = 0; first < size; first += kVocabBlock) {
        const int count = least(kVocabBlock, size - first);
        F32v best = set_f32(kNever), numbers = set_f32(0.0f);
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            const F32v x = load_f32(z + first + i);
            best = max(x, best);
            numbers = numbers + x;  // NaN if a value is NaN, or for inf - inf: the loop below decides
        }
        float top = max_lane(best);
        nan |= ~equal(numbers, numbers);
        for (; i < count; ++i) {
            const float x = z[first + i];
            nan |= x != x;
            top = x > top ? x : top;
        }
        maxima[first / kVocabBlock] = top;
    }
    nan &= (1u << kLanes) - 1;
    for (int i = 0; nan && i < size; ++i) {
        if (z[i] != z[i]) return false;
    }
    return true;
}

int argmax(const float* x, int n) {
    F32v best = set_f32(kNever);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) best = max(load_f32(x + i), best);
    float top = max_lane(best);
    for (; i < n; ++i) top = x[i] > top ? x[i] : top;
    const F32v wanted = set_f32(top);
    for (i = 0; i + kLanes <= n; i += kLanes) {
        if (const uint32_t lanes = equal(load_f32(x + i), wanted)) return i + __builtin_ctz(lanes);
    }
    for (; i < n && x[i] != top; ++i) {
    }
    return i < n ? i : 0;
}

int count(const float* x, int n, float limit) {
    const F32v wanted = set_f32(limit);
    int found = 0, i = 0;
    for (; i + kLanes <= n; i += kLanes) found += __builtin_popcount(at_least(load_f32(x + i), wanted));
    for (; i < n; ++i) found += x[i] >= limit;
    return found;
}

template <bool scaled>
int collect_scaled(const LogitRow& row, float limit, int32_t* ids, float* values) {
    const F32v wanted = set_f32(limit);
    I32v lane = {};
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    int found = 0;
    for (Blocks block(row, limit); block.next();) {
        for (int i = 0; i < kVocabBlock; i += kLanes) {
            const F32v x = logits_at<scaled>(block.z + i, row.temperature);
            const uint32_t lanes = at_least(x, wanted);
            if (!lanes) continue;
            compress_f32(values + found, lanes, x);
            compress_i32(ids + found, lanes, lane + (block.first + i));
            found += __builtin_popcount(lanes);
        }
    }
    return found;
}

int collect(const LogitRow& row, float limit, int32_t* ids, float* values) {
    if (limit < -__FLT_MAX__) limit = -__FLT_MAX__;
    return row.temperature == 1.0f ? collect_scaled<false>(row, limit, ids, values)
                                   : collect_scaled<true>(row, limit, ids, values);
}

int ahead(const LogitRow& row, float value, int32_t id) {
    int found = 0;
    for (Blocks block(row, value); block.next();) {
        for (int i = 0; i < kVocabBlock; i += kLanes) {
            const F32v x = load_f32(block.z + i) / set_f32(row.temperature);
            uint32_t lanes = above(x, set_f32(value));
            const int before = id - block.first - i;  // lanes with a lower id: equal values rank before `id`
            if (before > 0) lanes |= equal(x, set_f32(value)) & (before >= kLanes ? ~0u : (1u << before) - 1);
            found += __builtin_popcount(lanes);
        }
    }
    return found;
}

// e^x for x <= 0 (clamped to kFar), relative error 2e-14: below the resolution of the fixed point.
HEADRACE_INLINE F64v exp_f64(F64v x) {
    constexpr double kTerms[10] = {1.0,
                                   1.0,
                                   0x1.fffffffff13eep-2,
                                   0x1.5555555589e68p-3,
                                   0x1.5555557df0fa8p-5,
                                   0x1.1111108e4d8d4p-7,
                                   0x1.6c163be4faec8p-10,
                                   0x1.a01b7304629d0p-13,
                                   0x1.a16e37c1f45e0p-16,
                                   0x1.710218071b340p-19};
    x = max_f64(x, set_f64(kFar));
    const F64v shifted = fma_f64(x, set_f64(1.4426950408889634), set_f64(kRound));
    const F64v n = shifted - set_f64(kRound);
    const F64v r = fma_f64(n, set_f64(-0x1.ef35793c7673p-45), fma_f64(n, set_f64(-0x1.62e42fefa38p-1), x));
    F64v p = set_f64(kTerms[9]);
#pragma GCC unroll 9
    for (int i = 8; i >= 0; --i) p = fma_f64(p, r, set_f64(kTerms[i]));
    return (F64v)((U64v)p + ((U64v)shifted << 52));
}

template <bool scaled>
int64_t total_scaled(const LogitRow& row, float best) {
    const F64v top = set_f64(best), round = set_f64(kRound), point = set_f64(kPoint);
    const I64v zero = (I64v)round;
    I64v sum = {};
    for (Blocks block(row, best + kShareless); block.next();) {
        for (int i = 0; i < kVocabBlock; i += kLanes) {
            const F32v x = logits_at<scaled>(block.z + i, row.temperature);
            const F64v low = exp_f64(widen_low(x) - top), high = exp_f64(widen_high(x) - top);
            sum += ((I64v)(low * point + round) - zero) + ((I64v)(high * point + round) - zero);
        }
    }
    int64_t all = 0;
    for (int i = 0; i < kHalf; ++i) all += sum[i];
    return all;
}

int64_t total(const LogitRow& row, float best) {
    return row.temperature == 1.0f ? total_scaled<false>(row, best) : total_scaled<true>(row, best);
}

void weights(const float* x, int n, float best, double* out) {
    const F64v top = set_f64(best);
    for (int i = 0; i < n; i += kLanes) {
        const int rest = least(kLanes, n - i);
        const F32v v = load_f32(x + i, rest);
        double lane[kLanes];
        const F64v low = widen_low(v) - top, high = widen_high(v) - top;
        const F64v zero = {};
        const F64v a = low > set_f64(kFar) ? exp_f64(low) : zero, b = high > set_f64(kFar) ? exp_f64(high) : zero;
        __builtin_memcpy(lane, &a, sizeof a);
        __builtin_memcpy(lane + kHalf, &b, sizeof b);
        __builtin_memcpy(out + i, lane, 8 * static_cast<size_t>(rest));
    }
}

HEADRACE_INLINE void take(Best& best, float score, int32_t id) {
    if (score > best.score || (score == best.score && (best.id < 0 || id < best.id) && score > kNever))
        best = {score, id};
}

// Bound on random words: words from this value on give too little noise to raise `top` to `score`. The noise is below
// -ln(word / 2^32), and 2^-floor(g / ln 2) is at least e^-g. The margin covers the rounding of the sums.
HEADRACE_INLINE uint32_t useful_words(float top, float score) {
    const float size = (top < 0 ? -top : top) + (score < 0 ? -score : score);
    const float need = (score - top) - (size * 1e-6f + 1e-4f);
    if (!(need > 0.6931472f)) return ~0u;
    return need > 22.0f ? need > 23.0f ? 0u : 4u : ~0u >> static_cast<int>(need * 1.44269504f);
}

template <bool scaled>
HEADRACE_INLINE void draw_block(const LogitRow& row, int first, TokenCut keep, const Noise& noise, Best& best) {
    const float top = row.maxima[first / kVocabBlock] / row.temperature;
    if (!(top >= keep.value) || top == kNever) return;
    const uint32_t useful = useful_words(top, best.score);
    if (!useful) return;
    float score[kLanes];
    Blocks block(row, top);
    block.seek(first);
    for (int group = 0; group < kVocabBlock; group += 4 * kLanes) {
        U32v w[4];
        noise_words(w, first + group, noise);
        if (!below(min_u32(min_u32(w[0], w[1]), min_u32(w[2], w[3])), set_u32(useful)) && useful != ~0u) continue;
        for (int j = 0; j < 4; ++j) {
            const int at = group + j * kLanes, after = keep.last - (first + at);
            const F32v x = logits_at<scaled>(block.z + at, row.temperature);
            uint32_t kept = above(x, set_f32(keep.value));
            if (after >= 0) kept |= equal(x, set_f32(keep.value)) & (after >= kLanes - 1 ? ~0u : (2u << after) - 1);
            const F32v sum = x + gumbel(w[j]);
            kept &= at_least(sum, set_f32(best.score));
            if (!kept) continue;
            store_f32(score, sum);
            for (; kept; kept &= kept - 1) {
                const int i = __builtin_ctz(kept);
                take(best, score[i], first + at + i);
            }
        }
    }
}

template <bool scaled>
int draw_scaled(const LogitRow& row, TokenCut keep, const Noise& noise) {
    Best best{kNever, -1};
    const int blocks = (row.size + kVocabBlock - 1) / kVocabBlock;
    // The most likely block first: with its high score, most other blocks can be skipped.
    const int likely = argmax(row.maxima, blocks) * kVocabBlock;
    draw_block<scaled>(row, likely, keep, noise, best);
    for (int first = 0; first < row.size; first += kVocabBlock) {
        if (first != likely) draw_block<scaled>(row, first, keep, noise, best);
    }
    return best.id;
}

int draw(const LogitRow& row, TokenCut keep, const Noise& noise) {
    return row.temperature == 1.0f ? draw_scaled<false>(row, keep, noise) : draw_scaled<true>(row, keep, noise);
}

}  // namespace

extern const SampleKernels sample_kernels;
const SampleKernels sample_kernels = {block_maxima, argmax, count,         collect,      ahead,     total,
                                      weights,      draw,   gumbel_of_ids, gumbel_words, gumbel_row};

}  // namespace headrace::HEADRACE_ISA
