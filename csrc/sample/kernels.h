// The scans of the vocabulary that the sampler is made of. Noise, comparisons and logits have the same bits on every
// instruction set; sums of exp agree to a few units of their fixed point.
#pragma once

#include <stdint.h>

namespace headrace {

constexpr int kVocabBlock = 64;  // tokens to one entry of the block maxima

// One draw's place in the noise (the key is derived in Python, headrace.ops.noise).
struct Noise {
    uint32_t key[2];
    uint32_t position;  // of the token being drawn, from the start of the sequence
    uint32_t purpose;
};

// A row of logits. A scan sees z / temperature; `maxima` holds the largest z of every block of kVocabBlock.
struct LogitRow {
    const float* z;
    const float* maxima;
    int size;
    float temperature;
};

// The tokens above `value`, and of those equal to it the ones with ids up to `last`.
struct TokenCut {
    float value;
    int32_t last;
};

struct SampleKernels {
    // The largest of every block of z[size]; false where a logit is NaN.
    bool (*block_maxima)(const float* z, int size, float* maxima);
    // Index of the largest, the first of equals.
    int (*argmax)(const float* x, int n);
    // How many of x are `least` or more.
    int (*count)(const float* x, int n, float least);
    // Tokens whose logit is `least` or more and not -inf, ids ascending; both arrays have room for size + 16.
    int (*collect)(const LogitRow& row, float least, int32_t* ids, float* values);
    // How many tokens come before (value, id) in falling order of logits, of equals the lowest id first.
    int (*ahead)(const LogitRow& row, float value, int32_t id);
    // Sum over the row of exp(logit - best) in fixed point, each rounded to 2^-40: exact in any order.
    int64_t (*total)(const LogitRow& row, float best);
    // exp(x - best) in double; 0 where it is below e^-40.
    void (*weights)(const float* x, int n, float best, double* out);
    // argmax over the kept tokens of logit + noise, the lowest id of equals; -1 where none is above -inf.
    int (*draw)(const LogitRow& row, TokenCut keep, const Noise& noise);
    // Noise of n tokens, any ids.
    void (*gumbel)(const int32_t* ids, int n, const Noise& noise, float* out);
    // Tests: the noise of words, and of all ids below n.
    void (*gumbel_words)(const uint32_t* words, int n, float* out);
    void (*gumbel_row)(int n, const Noise& noise, float* out);
};

}  // namespace headrace
