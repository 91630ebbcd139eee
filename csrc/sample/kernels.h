// Kernels of the sampler: scans of the vocabulary. Noise, comparisons and logits have the same bits on every
// instruction set; sums of exp agree to a few units of their fixed point.
#pragma once

#include <stdint.h>

namespace headrace {

constexpr int kVocabBlock = 64;  // tokens per block maximum

// Identifies the noise of one draw. headrace.ops.noise derives the key.
struct Noise {
    uint32_t key[2];
    uint32_t position;  // index of the drawn token in the sequence
    uint32_t purpose;
};

// A row of logits. Scans use z / temperature. `maxima` has the largest z of every block of kVocabBlock tokens.
struct LogitRow {
    const float* z;
    const float* maxima;
    int size;
    float temperature;
};

// The tokens with a logit above `value`, and those equal to `value` with ids up to `last`.
struct TokenCut {
    float value;
    int32_t last;
};

struct SampleKernels {
    // Computes the maximum of every block of z[size]. Returns false if a logit is NaN.
    bool (*block_maxima)(const float* z, int size, float* maxima);
    // Index of the largest value, the first of equal ones.
    int (*argmax)(const float* x, int n);
    // Number of values x >= least.
    int (*count)(const float* x, int n, float least);
    // Lists the tokens with logit >= least and > -inf, ids ascending; returns their number. Both arrays need size + 16
    // elements.
    int (*collect)(const LogitRow& row, float least, int32_t* ids, float* values);
    // Number of tokens before (value, id) in descending order of logits; equal logits are in order of their ids.
    int (*ahead)(const LogitRow& row, float value, int32_t id);
    // Sum over the row of exp(logit - best) in fixed point; each exp is rounded to 2^-40, so the order does not matter.
    int64_t (*total)(const LogitRow& row, float best);
    // exp(x - best) in double; 0 if it is below e^-40.
    void (*weights)(const float* x, int n, float best, double* out);
    // argmax of logit + noise over the kept tokens, the lowest id of equal ones; -1 if no logit is above -inf.
    int (*draw)(const LogitRow& row, TokenCut keep, const Noise& noise);
    // Noise of n tokens with the given ids.
    void (*gumbel)(const int32_t* ids, int n, const Noise& noise, float* out);
    // For tests: the noise of n random words, and of all ids below n.
    void (*gumbel_words)(const uint32_t* words, int n, float* out);
    void (*gumbel_row)(int n, const Noise& noise, float* out);
};

}  // namespace headrace
