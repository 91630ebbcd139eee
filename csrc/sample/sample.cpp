#include "sample/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace headrace {
namespace {

constexpr double kPoint = 0x1p40;

const char* kNothing =
    "no token can be drawn: allowed_token_ids, structured_outputs, bad_words, logit_bias, min_tokens and "
    "no_repeat_ngram together rule out every one; relax one of them";

// The logarithm of a sum of shares, relative to the best logit.
double log_of(int64_t total) { return std::log(static_cast<double>(total) / kPoint); }

int argmax(const SampleKernels& kernels, const LogitRow& row) {
    const int blocks = (row.size + kVocabBlock - 1) / kVocabBlock;
    const int first = kernels.argmax(row.maxima, blocks) * kVocabBlock;
    return first + kernels.argmax(row.z + first, std::min(kVocabBlock, row.size - first));
}

}  // namespace

// The first word of Philox4x32-10.
double coin(NoiseKey key, uint32_t position, uint32_t purpose) {
    uint32_t c[4] = {position, 0, purpose, 0};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{c[0]} * 0xD2511F53u, b = uint64_t{c[2]} * 0xCD9E8D57u;
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key.k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ key.k1, static_cast<uint32_t>(a)};
        std::copy(next, next + 4, c);
        key.k0 += 0x9E3779B9u, key.k1 += 0xBB67AE85u;
    }
    return c[0] * 0x1p-32;
}

float Sampler::best_of(const LogitRow& row) const {
    const int blocks = (row.size + kVocabBlock - 1) / kVocabBlock;
    return row.maxima[kernels_.argmax(row.maxima, blocks)] / row.temperature;
}

double Sampler::norm_of(const LogitRow& row) const {
    const float best = best_of(row);
    return best + log_of(kernels_.total(row, best));
}

// Edits the row and filters its tokens into kept_.
std::string Sampler::choose(const SampleRow& row) {
    std::string error = edits_.open(row);
    if (error.empty()) error = edits_.apply(row);
    if (!error.empty()) return error;
    greedy_ = row.params->greedy();
    const LogitRow edited = edits_.edited(greedy_ ? 1.0f : row.params->temperature);
    const float best = best_of(edited);
    if (!std::isfinite(best)) {
        edits_.restore();
        return kNothing;
    }
    kept_.reset(edited, best);
    if (!greedy_) kept_.filter(*row.params);
    return "";
}

std::string Sampler::choose_with_coin(const SampleRow& row, NoiseKey key) {
    std::string error = choose(row);
    if (!error.empty() || greedy_ || !(row.params->xtc_probability > 0)) return error;
    const double thrown = coin(key, static_cast<uint32_t>(row.position()), kCoin);
    if (thrown < row.params->xtc_probability) kept_.exclude_top(row.params->xtc_threshold);
    return "";
}

std::string Sampler::draw(const SampleRow& row, std::span<const NoiseKey> keys, Report report,
                          std::vector<TokenReport>& out, uint32_t purpose) {
    out.assign(keys.size(), {});
    if (row.params->xtc_probability > 0 && keys.size() > 1) return draw_singly(row, keys, report, out, purpose);
    std::string error = choose(row);
    if (!error.empty()) return error;
    const uint32_t position = static_cast<uint32_t>(row.position());
    const double tau = greedy_ ? 0.0 : row.params->mirostat_tau, mu = row.mu.value_or(2 * tau);
    double norm = 0;
    if (tau > 0) {
        norm = kept_.best() + log_of(kept_.total());
        kept_.surprise(mu);
    }
    const double often = greedy_ || keys.empty() ? 0.0 : row.params->xtc_probability;
    if (often > 0 && coin(keys[0], position, kCoin) < often) kept_.exclude_top(row.params->xtc_threshold);
    for (size_t i = 0; i < keys.size(); ++i) {
        const Noise noise{{keys[i].k0, keys[i].k1}, position, purpose};
        out[i].id = greedy_ ? argmax(kernels_, edits_.edited(1.0f)) : kept_.draw(noise);
    }
    if (tau > 0) {
        const LogitRow edited = edits_.edited(row.params->temperature);
        for (TokenReport& drawn : out) {
            const double bits = (norm - edited.z[drawn.id] / edited.temperature) / std::numbers::ln2;
            drawn.mu = mu - row.params->mirostat_eta * (bits - tau);
        }
    }
    report_chosen(*row.params, report, out);
    return "";
}

// Undoes the edits of the row that `choose` chose from.
void Sampler::report_chosen(const SampleParams& params, Report report, std::span<TokenReport> out) {
    const bool raw = !report.processed && !params.masked_logprobs;
    const LogitRow masked = edits_.edited(1.0f);
    if (report.k >= 0 && report.processed) describe_kept(report.k, out);
    if (report.k >= 0 && !report.processed && !raw) describe(masked, norm_of(masked), report.k, out);
    edits_.restore();
    if (report.k >= 0 && raw) describe(edits_.raw(), norm_of(edits_.raw()), report.k, out);
}

// With XTC each key has its own coin, so the kept tokens differ from key to key.
std::string Sampler::draw_singly(const SampleRow& row, std::span<const NoiseKey> keys, Report report,
                                 std::span<TokenReport> out, uint32_t purpose) {
    std::vector<TokenReport> drawn;
    for (size_t i = 0; i < keys.size(); ++i) {
        std::string error = draw(row, keys.subspan(i, 1), report, drawn, purpose);
        if (!error.empty()) return error;
        out[i] = drawn.front();
    }
    return "";
}

std::string Sampler::verify(const SampleRow& first, const DraftTree& tree, RowStrides strides, NoiseKey key,
                            Report report, Walk& out) {
    out.path.clear();
    out.reports.clear();
    std::vector<int32_t> drawn;
    std::vector<TokenReport> reports;
    for (int32_t node = -1;;) {
        SampleRow row = first;
        row.logits += (node + 1) * strides.logits;
        if (row.maxima) row.maxima += (node + 1) * strides.maxima;
        if (row.mask) row.mask += (node + 1) * strides.mask;
        row.path = drawn;
        if (!out.reports.empty() && first.params->mirostat_tau > 0) row.mu = out.reports.back().mu;
        std::string error = draw(row, {&key, 1}, report, reports);
        if (!error.empty()) {
            if (out.path.empty()) return error;
            out.path.pop_back();  // no token can follow this node: its token is the last of the walk
            return "";
        }
        out.reports.push_back(reports.front());
        const int32_t token = reports.front().id, parent = node;
        for (size_t child = static_cast<size_t>(parent + 1); child < tree.tokens.size() && node == parent; ++child) {
            if (tree.parents[child] == parent && tree.tokens[child] == token) node = static_cast<int32_t>(child);
        }
        if (node == parent) return "";
        out.path.push_back(node);
        drawn.push_back(token);
    }
}

std::string Sampler::top(const SampleRow& row, int k, TokenReport& out) {
    out = {};
    std::string error = edits_.open(row);
    std::optional<double> norm;  // a mask must not change log-probabilities: use the norm without it
    if (error.empty() && row.mask) norm = norm_of(edits_.raw());
    if (error.empty()) error = edits_.apply(row);
    if (!error.empty()) return error;
    const LogitRow edited = edits_.edited(1.0f);
    const float best = best_of(edited);
    if (std::isfinite(best)) describe(edited, norm ? *norm : norm_of(edited), k, {&out, 1});
    edits_.restore();
    return std::isfinite(best) ? "" : kNothing;
}

std::string Sampler::score(const SampleRow& row, int32_t token, int k, TokenReport& out) {
    out = {};
    if (token < 0 || token >= size_) {
        return "token id " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(size_);
    }
    std::string error = edits_.open(row);
    if (!error.empty()) return error;
    out.id = token;
    describe(edits_.raw(), norm_of(edits_.raw()), k, {&out, 1});
    return "";
}

// Fills the log-probabilities of each report's token (if any) and of the k best tokens. `norm`: log of the sum of
// exp(logit) over the row.
void Sampler::describe(const LogitRow& row, double norm, int k, std::span<TokenReport> out) {
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
    if (k > 0) {
        kept_.reset(row, best_of(row));
        kept_.top_k(k);
        kept_.list();
        for (const int place : kept_.order(k)) {
            const float value = kept_.values()[static_cast<size_t>(place)];
            if (!(value > -std::numeric_limits<float>::infinity())) break;
            ids.push_back(kept_.ids()[static_cast<size_t>(place)]);
            logprobs.push_back(static_cast<float>(value - norm));
        }
    }
    for (TokenReport& report : out) {
        report.top_ids = ids;
        report.top_logprobs = logprobs;
        if (report.id < 0) continue;
        const float value = row.z[report.id] / row.temperature;
        report.logprob = static_cast<float>(value - norm);
        report.rank = 1 + kernels_.ahead(row, value, report.id);
    }
}

// The same over the kept tokens.
void Sampler::describe_kept(int k, std::span<TokenReport> out) {
    if (kept_.all()) return describe(kept_.row(), norm_of(kept_.row()), k, out);
    kept_.list();
    const double norm = kept_.best() + log_of(kept_.total());
    const std::vector<int> order = kept_.order(static_cast<int>(kept_.ids().size()));
    for (TokenReport& report : out) {
        for (size_t place = 0; place < order.size(); ++place) {
            const size_t at = static_cast<size_t>(order[place]);
            const float logprob = static_cast<float>(kept_.values()[at] - norm);
            if (kept_.ids()[at] == report.id) report.logprob = logprob, report.rank = static_cast<int>(place) + 1;
            if (place >= static_cast<size_t>(k) || !(logprob > -std::numeric_limits<float>::infinity())) continue;
            report.top_ids.push_back(kept_.ids()[at]);
            report.top_logprobs.push_back(logprob);
        }
    }
}

}  // namespace headrace
