#include "program/needs.h"

#include <algorithm>
#include <stdexcept>

#include "sample/kernels.h"

namespace headrace {
namespace {

constexpr int kMostDistance = 1 << 20;

using Accesses = std::vector<Access>;
using Holds = Access::Holds;

Access reads(Place place, int64_t width) { return {place, width}; }
Access writes(Place place, int64_t width, bool in_place = false) {
    return {place, width, Holds::kFloats, true, in_place};
}

void check_norm(const NormWeights& norm, int64_t width) {
    if (norm.kind == NormKind::kNone) return;
    const auto size = static_cast<int64_t>(norm.weight.size());
    require(size == width && (norm.bias.empty() || norm.bias.size() == norm.weight.size()),
            "a norm of " + std::to_string(size) + " weights cannot be taken of " + std::to_string(width) + " columns");
}

// Visitor that checks one phase and returns its accesses.
struct NeedsOf {
    SegmentKind segment;
    const ProgramShape& shape;

    Accesses operator()(const EmbedPhase& work) const {
        require(segment != SegmentKind::kHead, "tokens are not looked up in the head");
        require(!work.positions || work.positions->k == work.table.k,
                "the tables of tokens and of positions have rows of one width");
        check_borders(work);
        require(work.offset.empty() || work.offset.size() == static_cast<size_t>(work.table.k),
                "what is added to every token is as wide as the table");
        require(work.separator < 0 || work.second.size() == static_cast<size_t>(work.table.k),
                "the second type is as wide as the table");
        check_rope(work.sinusoids, "an embedding");
        require(work.sinusoids < 0 || rope(work.sinusoids).dim == work.table.k,
                "sines and cosines are as wide as the table, together");
        return {writes({work.out, 0}, work.table.k)};
    }

    Accesses operator()(const NormPhase& work) const {
        require(work.norm.kind != NormKind::kNone, "a norm is rms or layer");
        check_norm(work.norm, work.width);
        return {reads(work.in, work.width), writes(work.out, work.width, true)};
    }

    Accesses operator()(const QuantizePhase& work) const {
        const int width = shape.buffer(work.out).width();
        check_norm(work.norm, width);
        require(work.order.empty() || static_cast<int>(work.order.size()) == width,
                "an order of columns names each once");
        std::vector<bool> named(work.order.size());
        for (const int32_t column : work.order) {
            require(column >= 0 && column < width && !named[static_cast<size_t>(column)],
                    "an order of columns names each once");
            named[static_cast<size_t>(column)] = true;
        }
        Accesses accesses{reads(work.in, width), {{work.out, 0}, width, Holds::kInput, true}};
        if (work.extremes >= 0) {
            require(work.order.empty(), "an order of columns names those of whole rows, not of a rank's part");
            accesses.push_back(reads({work.extremes, 0}, 1));
        }
        return accesses;
    }

    Accesses operator()(const LinearPhase& work) const {
        const PackedLinear& linear = work.linear;
        const bool gated = work.kind == EpilogueKind::kGated, logits = work.kind == EpilogueKind::kLogits;
        require(linear.gated() == gated,
                gated ? "a gated result needs a gated layer" : "a gated layer leaves a gated result and nothing else");
        require(!logits || segment == SegmentKind::kHead, "logits come from the head");
        const Access input{{work.in, 0}, linear.inputs(), linear.bf16() ? Holds::kBf16 : Holds::kA8};
        require(logits || work.maxima == -1, "only logits have maxima");
        if (gated) return {input, {work.out, linear.n(), Holds::kResult, true}};
        if (!logits && shape.buffer(work.out.buffer).kind() == BufferKind::kPartial) {
            require(work.kind == EpilogueKind::kStore, "a partial result is stored, and added once it is a sum");
            for (const PackedTensor& part : linear.parts())
                require(!part.bias, "a bias is added to the sum, not to a partial result");
            return {input, {work.out, linear.n(), Holds::kPartial, true}};
        }
        if (!logits) return {input, writes(work.out, linear.n())};
        require(linear.parts().size() == 1, "the head is one tensor, not several");
        require(linear.n() <= shape.vocab_size, "the head must have one output for each token");
        require(work.out.column % kVocabBlock == 0, "logits begin at a block of the vocabulary");
        return {input, writes(work.out, linear.n()),
                writes({work.maxima, work.out.column / kVocabBlock}, blocks_of(linear.n()))};
    }

    Accesses operator()(const ActPhase& work) const {
        return {reads(work.in, work.width), writes(work.out, work.width, true)};
    }

    Accesses operator()(const ActMulPhase& work) const {
        const Place up{work.in.buffer, work.in.column + work.width};
        return {reads(work.in, work.width), reads(up, work.width), writes(work.out, work.width)};
    }

    Accesses operator()(const ResidualPhase& work) const {
        check_norm(work.post_norm, work.width);
        return {reads(work.x, work.width), reads(work.y, work.width), writes(work.out, work.width, true)};
    }

    Accesses operator()(const AttentionPhase& work) const {
        require(segment == SegmentKind::kLayer, "attention belongs to a layer");
        const KVShape& kv = shape.kv_of(work.pool, work.layer);
        const int heads = work.view.heads;
        require(work.view.fits(kv), "attention has a multiple of the " + std::to_string(kv.heads) + " KV heads, not " +
                                        std::to_string(heads));
        require(work.view.window >= 0, "a window is 0 (none) or more tokens");
        require(work.pool == 0 || (work.view.window > 0 && work.view.causal && !work.view.source),
                "the pool of window layers is for causal attention with a window");
        for (const int number : {work.rope, work.q_rope}) {
            check_rope(number, "attention");
            require(number < 0 || rope(number).dim <= kv.dim, "a rope turns more values than a head has");
        }
        for (const NormWeights* norm : {&work.q_norm, &work.k_norm}) {
            require(norm->kind != NormKind::kLayer && norm->bias.empty(),
                    "heads are normalised by rms, without a bias");
            check_norm(*norm, kv.dim);
        }
        require(work.q_norm.kind == NormKind::kNone || work.k_norm.kind == NormKind::kNone ||
                    work.q_norm.eps == work.k_norm.eps,
                "the norms of q and k have one eps");
        require(work.sinks.empty() || work.sinks.size() == static_cast<size_t>(heads), "one sink for each head");
        check_bias(work);
        const int64_t kv_width = int64_t{kv.heads} * kv.dim, width = int64_t{heads} * kv.dim;
        require(work.k_shift.empty() || static_cast<int64_t>(work.k_shift.size()) == kv_width,
                "k_shift holds a value for each of K's");
        const Access result{work.out, width, Holds::kResult, true, false, kv.dim};
        if (work.view.source) {
            require(work.view.window == 0, "rows that read a source see all of it: they have no window");
            return {reads(work.q, width), result};
        }
        if (work.view.shared) return {reads(work.q, width), result};
        const int64_t stride = shape.buffer(work.q.buffer).stride();
        require(shape.buffer(work.k.buffer).stride() == stride && shape.buffer(work.v.buffer).stride() == stride,
                "q, k and v must be columns of one buffer, or of buffers of one width");
        return {reads(work.q, width), reads(work.k, kv_width), reads(work.v, kv_width), result};
    }

    Accesses operator()(const StorePhase& work) const {
        require(segment == SegmentKind::kLayer, "K and V are stored by a layer");
        const KVShape& kv = shape.kv_of(work.pool, work.layer);
        require(shape.buffer(work.k.buffer).stride() == shape.buffer(work.v.buffer).stride(),
                "k and v must be columns of one buffer, or of buffers of one width");
        const int64_t width = int64_t{kv.heads} * kv.dim;
        return {reads(work.k, width), reads(work.v, width)};
    }

    Accesses operator()(const TapPhase& work) const {
        require(segment != SegmentKind::kHead, "the rows of the head are not all rows: they have no taps");
        require(work.tap >= 0 && work.tap < shape.taps, "there is no tap " + std::to_string(work.tap));
        require(work.width == shape.hidden, "a tap's rows are as wide as the hidden ones");
        return {reads(work.in, work.width)};
    }

    Accesses operator()(const CopyPhase& work) const {
        return {reads(work.in, work.width), writes(work.out, work.width)};
    }

    Accesses operator()(const ScatterPhase& work) const {
        require(segment == SegmentKind::kHead && work.vocab_size == shape.vocab_size,
                "logits are put into their places in the head, among those of all tokens");
        require(std::is_sorted(work.ids.begin(), work.ids.end()) && !work.ids.empty() && work.ids.front() >= 0 &&
                    work.ids.back() < work.vocab_size,
                "the tokens of a part of the head must be named in ascending order");
        return {reads({work.in, 0}, static_cast<int64_t>(work.ids.size())), writes({work.out, 0}, work.vocab_size),
                writes({work.maxima, 0}, blocks_of(work.vocab_size))};
    }

    Accesses operator()(const ReducePhase& work) const {
        check_ranks();
        require(work.bias.empty() || work.bias.size() == static_cast<size_t>(work.width), "a bias is as wide as a sum");
        require(shape.buffer(work.partial).width() == work.width, "a sum is as wide as the partial results");
        return {{{work.partial, 0}, work.width, Holds::kPartial}, writes(work.out, work.width)};
    }

    Accesses operator()(const GatherPhase& work) const {
        check_ranks();
        const Buffer& buffer = shape.buffer(work.buffer);
        require(buffer.common() || segment == SegmentKind::kLayer, "the rows of a layer are gathered");
        require(buffer.rounding() != Rounding::kSplit, "rows with outliers are not gathered");
        return {};
    }

    Accesses operator()(const AdapterPhase& work) const {
        require(segment == SegmentKind::kLayer && !shape.ranks,
                "adapters belong to the layers of a model without ranks");
        const int most = shape.buffer(work.low).width();
        require(!work.parts.empty(), "a phase of adapters changes a part of the layer's output");
        for (const AdaptedPart& part : work.parts) {
            require(part.column >= 0 && part.width > 0 && part.column + part.width <= work.out_width,
                    "a part lies inside the layer's output");
            require(part.low >= 0 && part.rank > 0 && part.low + part.rank <= most,
                    "the ranks of all parts fit their buffer");
            for (const LowRank& adapter : part.adapters) {
                const auto rank = static_cast<size_t>(adapter.rank);
                require(adapter.rank >= 0 && adapter.rank <= part.rank &&
                            adapter.down.size() == rank * static_cast<size_t>(work.in_width) &&
                            adapter.up.size() == rank * static_cast<size_t>(part.width),
                        "an adapter's matrices are as wide as its layer, and no rank is above the largest");
            }
        }
        return {reads(work.in, work.in_width), reads(work.out, work.out_width), writes({work.low, 0}, most),
                writes(work.out, work.out_width, true)};
    }

    Accesses operator()(const ExtremePhase& work) const {
        check_ranks();
        return {reads(work.in, work.width), writes({work.out, 0}, 1)};
    }

    void check_ranks() const { require(shape.ranks != nullptr, "the program has no ranks to exchange with"); }

    void check_borders(const EmbedPhase& work) const {
        if (work.borders.empty()) return;
        check_ranks();
        const size_t ranks = static_cast<size_t>(shape.ranks->world()), own = static_cast<size_t>(shape.ranks->rank());
        require(work.borders.size() == ranks + 1 && work.borders.front() == 0 &&
                    std::is_sorted(work.borders.begin(), work.borders.end()),
                "each rank has the rows of the table between two ascending borders");
        require(work.table.n == work.borders[own + 1] - work.borders[own], "a rank's table has the rows of its part");
        require(shape.buffer(work.out).width() == work.table.k, "the rows of a table fill their buffer");
    }

    const Rope& rope(int number) const { return shape.ropes[static_cast<size_t>(number)]; }

    void check_rope(int number, const std::string& who) const {
        require(number >= -1 && number < static_cast<int>(shape.ropes.size()), who + " names a rope that is not there");
    }

    static void check_bias(const AttentionPhase& work) {
        const size_t size = work.bias.size(), heads = static_cast<size_t>(work.view.heads);
        require(work.view.biased == (size > 0), "a view says whether its scores depend on the distance");
        if (size == 0) return;
        require(work.bias_most >= 0 && work.bias_most <= kMostDistance && !work.view.source &&
                    size == heads * static_cast<size_t>(bias_width(work.bias_most)),
                "distances have a number for each head, and are those within a text");
    }

    static int64_t blocks_of(int tokens) { return (int64_t{tokens} + kVocabBlock - 1) / kVocabBlock; }
};

}  // namespace

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

const Buffer& ProgramShape::buffer(int number) const {
    require(number >= 0 && number < static_cast<int>(buffers.size()), "there is no buffer " + std::to_string(number) +
                                                                          ": they are numbered to " +
                                                                          std::to_string(buffers.size() - 1));
    return buffers[static_cast<size_t>(number)];
}

const KVShape& ProgramShape::kv_of(int pool, int layer) const {
    require(pool >= 0 && pool < static_cast<int>(kv.size()), "the program has no KV pool " + std::to_string(pool));
    const KVPool& of = *kv[static_cast<size_t>(pool)]->pool;
    require(layer >= 0 && layer < of.layers(), "the KV pool has no layer " + std::to_string(layer));
    return of.shape();
}

std::vector<Access> needs_of(const Phase& phase, SegmentKind segment, const ProgramShape& shape) {
    return std::visit(NeedsOf{segment, shape}, phase.work);
}

std::string in_words(const Access& access) {
    const std::string buffer = "buffer " + std::to_string(access.place.buffer);
    if (access.holds != Access::Holds::kFloats) return "all of " + buffer;
    return "columns [" + std::to_string(access.place.column) + ", " +
           std::to_string(access.place.column + access.width) + ") of " + buffer;
}

}  // namespace headrace
