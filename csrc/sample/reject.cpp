// Speculative sampling by rejection (Leviathan et al. 2022) and by block verification (Sun et al. 2024). Decides like
// headrace.ops.rejection in torch. p and q are the distributions after all filters of a draw.
#include <algorithm>
#include <cmath>

#include "sample/sample.h"

namespace headrace {
namespace {

// The probability of `token` in the draft distribution of chain position `at`.
double q_of(const DraftChain& chain, size_t at, int32_t token) {
    if (chain.q.empty()) return token == chain.tokens[at] ? 1.0 : 0.0;
    const std::vector<float>& row = chain.q[at];
    return static_cast<size_t>(token) < row.size() ? row[static_cast<size_t>(token)] : 0.0;
}

// Computes max(0, share * p - q) of every token of p; returns the sum.
double residual(const Distribution& p, double share, const DraftChain& chain, size_t at, std::vector<double>* out) {
    double sum = 0;
    if (out) out->resize(p.ids.size());
    for (size_t i = 0; i < p.ids.size(); ++i) {
        const double left = std::max(share * p.shares[i] - q_of(chain, at, p.ids[i]), 0.0);
        sum += left;
        if (out) (*out)[i] = left;
    }
    return sum;
}

}  // namespace

double Distribution::of(int32_t token) const {
    const auto place = std::lower_bound(ids.begin(), ids.end(), token);
    return place != ids.end() && *place == token ? shares[static_cast<size_t>(place - ids.begin())] : 0.0;
}

std::string Sampler::distribution(const SampleRow& row, NoiseKey key, Distribution& out) {
    std::string error = choose_with_coin(row, key);
    if (!error.empty()) return error;
    kept_.list();
    out.ids = kept_.ids();
    out.shares.resize(out.ids.size());
    kernels_.weights(kept_.values().data(), static_cast<int>(out.ids.size()), kept_.best(), out.shares.data());
    double sum = 0;
    for (const double share : out.shares) sum += share;
    for (double& share : out.shares) share /= sum;
    edits_.restore();
    return "";
}

std::string Sampler::propose(const SampleRow& row, NoiseKey key, int32_t& token, std::vector<float>& q) {
    Distribution found;
    std::string error = distribution(row, key, found);
    if (!error.empty()) return error;
    token = kept_.draw({{key.k0, key.k1}, static_cast<uint32_t>(row.position()), kDraft});
    q.assign(static_cast<size_t>(size_), 0.0f);
    for (size_t i = 0; i < found.ids.size(); ++i)
        q[static_cast<size_t>(found.ids[i])] = static_cast<float>(found.shares[i]);
    return "";
}

// Draws from the residual distribution `left` (unnormalized, for the ids of p): argmax of log(left) + noise.
int32_t Sampler::draw_left(const Distribution& p, const std::vector<double>& left, NoiseKey key, uint32_t position) {
    std::vector<float> noise(p.ids.size() + 16);
    kernels_.gumbel(p.ids.data(), static_cast<int>(p.ids.size()), {{key.k0, key.k1}, position, kResidual},
                    noise.data());
    size_t best = 0;
    double score = -HUGE_VAL;
    for (size_t i = 0; i < p.ids.size(); ++i) {
        const double value = std::log(left[i]) + static_cast<double>(noise[i]);
        if (value > score) score = value, best = i;
    }
    return p.ids[best];
}

std::string Sampler::reject(const SampleRow& first, const DraftChain& chain, RowStrides strides, NoiseKey key,
                            Report report, Walk& out) {
    out.path.clear();
    out.reports.clear();
    const auto row_at = [&](size_t at) {
        SampleRow row = first;
        row.logits += static_cast<ptrdiff_t>(at) * strides.logits;
        if (row.maxima) row.maxima += static_cast<ptrdiff_t>(at) * strides.maxima;
        if (row.mask) row.mask += static_cast<ptrdiff_t>(at) * strides.mask;
        row.path = chain.tokens.first(at);
        return row;
    };
    const uint32_t position = static_cast<uint32_t>(first.position());
    std::vector<Distribution> p(chain.tokens.size() + 1);
    size_t end = chain.tokens.size(), read = 0;  // end of the chain; number of rows read into p
    std::string error;
    const auto read_to = [&](size_t last) {  // a row without a token to draw ends the chain before it
        for (; read <= std::min(last, end) && error.empty(); ++read) {
            error = distribution(row_at(read), key, p[read]);
            if (!error.empty()) end = read;
        }
    };
    if (chain.block) read_to(end);
    read_to(0);
    if (end == 0 && !error.empty()) return error;
    size_t accepted = 0;
    double share = 1, kept = 1;  // block verification: weight of the chain so far, and at the last accepted token
    for (size_t at = 0; at < end; ++at) {
        const double ratio = p[at].of(chain.tokens[at]) / q_of(chain, at, chain.tokens[at]);
        const double thrown = coin(key, position + static_cast<uint32_t>(at), kAccept);
        if (!chain.block) {
            if (!(thrown < ratio)) break;
            accepted = at + 1;
            read_to(accepted);
            continue;
        }
        share = std::min(share * ratio, 1.0);
        double chance = share;
        if (at + 1 < end) {
            const double left = residual(p[at + 1], share, chain, at + 1, nullptr);
            chance = left / std::max(left + 1.0 - share, 1e-300);
        }
        if (thrown < chance) accepted = at + 1, kept = share;
    }
    std::vector<int32_t> tokens(chain.tokens.begin(), chain.tokens.begin() + static_cast<ptrdiff_t>(accepted));
    const bool drawn = accepted < end || error.empty();  // otherwise the last accepted token ends the walk
    for (size_t at = 0; at + !drawn < accepted; ++at) out.path.push_back(static_cast<int32_t>(at));
    if (drawn) {
        std::vector<double> left = p[accepted].shares;
        if (accepted < end && !(residual(p[accepted], kept, chain, accepted, &left) > 0)) left = p[accepted].shares;
        tokens.push_back(draw_left(p[accepted], left, key, position + static_cast<uint32_t>(accepted)));
    }
    for (size_t at = 0; at < tokens.size(); ++at) {
        TokenReport& drawn_token = out.reports.emplace_back();
        drawn_token.id = tokens[at];
        if (report.k < 0) continue;
        error = choose_with_coin(row_at(at), key);
        if (!error.empty()) return error;
        report_chosen(*first.params, report, {&drawn_token, 1});
    }
    return "";
}

}  // namespace headrace
