#include "sample/filters.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

namespace headrace {
namespace {

constexpr double kPoint = 0x1p40;
constexpr double kSlack = 0x1p-20;  // relative tolerance of a goal, about the precision of float32 logits
constexpr double kWeightless = 41;  // logits this far below the best have weight 0 in fixed point, even times the logit
constexpr int32_t kLastId = std::numeric_limits<int32_t>::max();
constexpr int kBins = 4096;
constexpr double kBinsPerNat = 64;  // kBins bins hold twice the largest distance between keys with a weight

// weight * 2^40, rounded to the nearest even integer: adding 1.5 * 2^52 leaves the integer in the low bits.
int64_t fixed(double weight) {
    constexpr double kRound = 0x1.8p52;
    return std::bit_cast<int64_t>(weight * kPoint + kRound) - std::bit_cast<int64_t>(kRound);
}

int64_t goal_of(int64_t total, double p) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(total) * (p * (1 - kSlack))));
}

}  // namespace

void Candidates::reset(const LogitRow& row, float best) {
    row_ = row;
    best_ = best;
    cut_ = {kNever, kLastId};
    listed_ = false;
}

void Candidates::filter(const SampleParams& params) {
    if (params.top_n_sigma > 0) top_n_sigma(params.top_n_sigma);
    if (params.top_k > 0) top_k(params.top_k);
    if (params.typical_p < 1) typical(params.typical_p);
    if (params.top_p < 1) top_p(params.top_p);
    if (params.min_p > 0) min_p(params.min_p);
}

void Candidates::top_k(int k) {
    if (k >= row_.size) return;
    if (!listed_) collect(std::max(cut_.value, least_of_best(k)));
    if (static_cast<size_t>(k) >= ids_.size()) return;
    shares_.assign(ids_.size(), 1);
    key_by_logit();
    keep_to(prefix(k, -static_cast<double>(best_)));
}

void Candidates::top_p(double p) {
    const int64_t all_shares = total(), goal = goal_of(all_shares, p);
    const bool was_listed = listed_;
    if (!was_listed) {
        // Tokens with at most this share are never needed: together they have at most all_shares - goal.
        const double spare = static_cast<double>(all_shares - goal) / row_.size / kPoint;
        const double reach = spare > 0 ? std::min(-std::log(spare), kWeightless) : kWeightless;
        collect(std::max(cut_.value, static_cast<float>(best_ - reach - 1e-3)));
        weigh();
    }
    key_by_logit();
    const Edge edge = prefix(goal, -static_cast<double>(best_));
    if (was_listed) return keep_to(edge);
    listed_ = false;
    cut_ = {static_cast<float>(-edge.key), edge.id};
}

// Meister et al., 2023: keeps the tokens whose surprise is closest to the entropy H. -log p - H = mean logit - logit.
void Candidates::typical(double p) {
    if (!listed_) collect(std::max(cut_.value, static_cast<float>(best_ - kWeightless)));
    weigh();
    int64_t sum = 0;
    for (size_t i = 0; i < ids_.size(); ++i) {
        if (weights_[i] > 0) sum += fixed(weights_[i] * (static_cast<double>(values_[i]) - best_));
    }
    const int64_t all = std::accumulate(shares_.begin(), shares_.end(), int64_t{0});
    const double mean = static_cast<double>(sum) / static_cast<double>(all);
    keys_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); ++i) keys_[i] = std::abs((static_cast<double>(values_[i]) - best_) - mean);
    keep_to(prefix(goal_of(all, p), 0));
}

void Candidates::min_p(double p) { keep_within(std::log(p) - kSlack); }

// Tang et al., 2024. Sigma is computed over all tokens that are not masked: this must be the first filter.
void Candidates::top_n_sigma(double n) {
    int64_t count = 0, sum = 0, squares = 0;
    for (int first = 0; first < row_.size; first += kVocabBlock) {
        if (row_.maxima[first / kVocabBlock] == kNever) continue;  // a masked block has no values
        for (int i = first; i < std::min(first + kVocabBlock, row_.size); ++i) {
            if (row_.z[i] == kNever) continue;
            const float x = row_.temperature == 1.0f ? row_.z[i] : row_.z[i] / row_.temperature;
            const double distance = std::min(static_cast<double>(best_) - x, 0x1p16);
            ++count;
            sum += std::llrint(distance * 0x1p16);
            squares += std::llrint(distance * distance * 0x1p12);
        }
    }
    const double mean = static_cast<double>(sum) / 0x1p16 / static_cast<double>(count);
    const double square = static_cast<double>(squares) / 0x1p12 / static_cast<double>(count);
    keep_within(-(std::sqrt(std::max(square - mean * mean, 0.0)) * n));
}

void Candidates::exclude_top(double threshold) {
    if (!listed_) list();
    const int64_t goal = goal_of(total(), threshold);
    const auto top = [&](size_t i) { return shares_[i] >= goal && shares_[i] > 0; };
    size_t least = ids_.size(), kept = 0;
    for (size_t i = 0; i < ids_.size(); ++i) {
        if (top(i) && (least == ids_.size() || values_[i] <= values_[least])) least = i;
    }
    best_ = kNever;
    for (size_t i = 0; i < ids_.size(); ++i) {
        if (top(i) && i != least) continue;
        ids_[kept] = ids_[i];
        values_[kept++] = values_[i];
        best_ = std::max(best_, values_[i]);
    }
    ids_.resize(kept);
    values_.resize(kept);
}

void Candidates::surprise(double most) {
    const double norm = std::log(static_cast<double>(total()) / kPoint);
    keep_within(std::min(norm - most * std::numbers::ln2 - kSlack, 0.0));
}

// Keeps the tokens with logit - best() >= limit.
void Candidates::keep_within(double limit) {
    if (limit == -std::numeric_limits<double>::infinity()) return;  // keeps all tokens
    if (!(limit < 0)) limit = 0;                                    // also if it is NaN: keeps the best
    float least = static_cast<float>(best_ + limit);                // smallest kept logit, up to a rounding error
    const auto kept = [&](float x) { return static_cast<double>(x) - best_ >= limit; };
    while (kept(std::nextafter(least, kNever))) least = std::nextafter(least, kNever);
    while (!kept(least)) least = std::nextafter(least, -kNever);
    if (!listed_) {
        if (least > cut_.value) cut_ = {least, kLastId};
        return;
    }
    key_by_logit();
    keep_to({-static_cast<double>(least), kLastId});
}

int32_t Candidates::draw(const Noise& noise) {
    if (!listed_) return kernels_.draw(row_, cut_, noise);
    noise_.resize(ids_.size());
    kernels_.gumbel(ids_.data(), static_cast<int>(ids_.size()), noise, noise_.data());
    size_t best = 0;
    float score = kNever;
    for (size_t i = 0; i < ids_.size(); ++i) {
        const float sum = values_[i] + noise_[i];
        if (sum > score) score = sum, best = i;
    }
    return ids_[best];
}

int64_t Candidates::total() {
    if (all()) return kernels_.total(row_, best_);
    if (!listed_) list();
    weigh();
    return std::accumulate(shares_.begin(), shares_.end(), int64_t{0});
}

void Candidates::list() {
    if (listed_) return;
    collect(cut_.value);
    key_by_logit();
    keep_to({-static_cast<double>(cut_.value), cut_.last});
}

std::vector<int> Candidates::order(int k) const {
    std::vector<int> places(ids_.size());
    std::iota(places.begin(), places.end(), 0);
    const size_t count = std::min(places.size(), static_cast<size_t>(k));
    std::partial_sort(places.begin(), places.begin() + static_cast<long>(count), places.end(), [&](int a, int b) {
        const float x = values_[static_cast<size_t>(a)], y = values_[static_cast<size_t>(b)];
        return x != y ? x > y : a < b;
    });
    places.resize(count);
    return places;
}

void Candidates::collect(float least) {
    const size_t room = static_cast<size_t>(row_.size) + 16;
    ids_.resize(room);
    values_.resize(room);
    const int found = kernels_.collect(row_, least, ids_.data(), values_.data());
    ids_.resize(static_cast<size_t>(found));
    values_.resize(static_cast<size_t>(found));
    listed_ = true;
}

void Candidates::weigh() {
    weights_.resize(ids_.size());
    shares_.resize(ids_.size());
    kernels_.weights(values_.data(), static_cast<int>(values_.size()), best_, weights_.data());
    for (size_t i = 0; i < ids_.size(); ++i) shares_[i] = fixed(weights_[i]);
}

void Candidates::key_by_logit() {
    keys_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); ++i) keys_[i] = -static_cast<double>(values_[i]);
}

// Removes the tokens after the edge from the list.
void Candidates::keep_to(Edge edge) {
    size_t kept = 0;
    best_ = kNever;
    for (size_t i = 0; i < ids_.size(); ++i) {
        if (keys_[i] > edge.key || (keys_[i] == edge.key && ids_[i] > edge.id)) continue;
        ids_[kept] = ids_[i];
        values_[kept++] = values_[i];
        best_ = std::max(best_, values_[i]);
    }
    ids_.resize(kept);
    values_.resize(kept);
}

// A lower bound of the k-th largest logit: at least k block maxima reach it.
float Candidates::least_of_best(int k) const {
    const int blocks = (row_.size + kVocabBlock - 1) / kVocabBlock;
    if (k > blocks / 2) return kNever;
    const auto enough = [&](float least) { return kernels_.count(row_.maxima, blocks, least) >= k; };
    float high = row_.maxima[kernels_.argmax(row_.maxima, blocks)], low = high - 1;
    for (float step = 1; !enough(low); step *= 2) {
        if (step > 1e6f * (1 + std::abs(high))) return kNever;
        high = low;
        low -= step;
    }
    for (int i = 0; i < 8; ++i) {
        const float middle = low + (high - low) / 2;
        (enough(middle) ? low : high) = middle;
    }
    return low / row_.temperature;
}

// Last token of the smallest prefix, in ascending order of keys_, whose shares_ sum to the goal; all tokens if they do
// not. `origin`: a lower bound of the keys.
Candidates::Edge Candidates::prefix(int64_t goal, double origin) {
    const size_t n = ids_.size();
    places_.resize(n);
    size_t crossing = n;  // number of tokens in the bin that reaches the goal
    int64_t sum = 0;
    if (n <= 256) {
        std::iota(places_.begin(), places_.end(), 0);
    } else {
        const auto bin_of = [&](double key) {
            const double bin = (key - origin) * kBinsPerNat;
            return bin < kBins - 1 ? static_cast<size_t>(bin) : size_t{kBins - 1};
        };
        bins_.assign(kBins, 0);
        for (size_t i = 0; i < n; ++i) bins_[bin_of(keys_[i])] += shares_[i];
        size_t bin = 0;
        while (bin < kBins - 1 && sum + bins_[bin] < goal) sum += bins_[bin++];
        crossing = 0;
        for (size_t i = 0; i < n; ++i) {
            if (bin_of(keys_[i]) == bin) places_[crossing++] = static_cast<int>(i);
        }
    }
    const auto first = [&](int a, int b) {
        const double x = keys_[static_cast<size_t>(a)], y = keys_[static_cast<size_t>(b)];
        return x != y ? x < y : a < b;
    };
    std::sort(places_.begin(), places_.begin() + static_cast<long>(crossing), first);
    for (size_t i = 0; i < crossing; ++i) {
        const size_t place = static_cast<size_t>(places_[i]);
        sum += shares_[place];
        if (sum >= goal) return {keys_[place], ids_[place]};
    }
    return {std::numeric_limits<double>::infinity(), kLastId};
}

}  // namespace headrace
