#include "program/phases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pack/kernels.h"
#include "ranks/sums.h"

namespace headrace {
namespace {

template <class... Fs>
struct Overloaded : Fs... {
    using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;  // clang before 17 does not deduce it

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int first, int last, int width) {
    for (int r = first; r < last; ++r)
        std::memcpy(to + r * to_stride, from + r * from_stride, sizeof(float) * static_cast<size_t>(width));
}

void activate(const Kernels& kernels, ActKind kind, const float* x, int n, float* out) {
    switch (kind) {
        case ActKind::kSilu:
            return kernels.quantize->act(Activation::kSilu, x, n, out);
        case ActKind::kGeluTanh:
            return kernels.quantize->act(Activation::kGeluTanh, x, n, out);
        case ActKind::kGelu:
            return kernels.quantize->act(Activation::kGelu, x, n, out);
        case ActKind::kRelu:
            for (int i = 0; i < n; ++i) out[i] = x[i] < 0.0f ? 0.0f : x[i];
            return;
        case ActKind::kRelu2:
            for (int i = 0; i < n; ++i) out[i] = x[i] < 0.0f ? 0.0f : x[i] * x[i];
            return;
    }
}

// `quantize` for a phase with a column order: normalizes each row, gathers its columns, then quantizes it.
void quantize_ordered(const QuantizePhase& phase, Worker& w, int first, int last, const A8& a8) {
    const Buffer& out = w.buffer(phase.out);
    const QuantizeKernels& kernels = *w.run.kernels.quantize;
    const int width = out.width();
    float* gathered = reinterpret_cast<float*>(w.scratch);
    float* normed = gathered + (width + 15) / 16 * 16;
    for (int r = first; r < last; ++r) {
        const float* row = w.floats(phase.in) + r * w.stride(phase.in);
        if (phase.norm.kind != NormKind::kNone) {
            kernels.norm(row, 0, 0, 1, width, phase.norm.view(), normed, 0);
            row = normed;
        }
        for (int i = 0; i < width; ++i) gathered[i] = row[phase.order[static_cast<size_t>(i)]];
        if (a8.blocks) {
            kernels.to_a8(gathered, 0, r, r + 1, width, {}, nullptr, a8);
        } else {
            kernels.to_bf16(gathered, 0, r, r + 1, width, {}, nullptr, out.bf16(w.rows, w.thread));
        }
    }
}

// The A8 output of the phase. Rounding::kTensor without a scale becomes one scale per row.
A8 input_of(const QuantizePhase& phase, const Worker& w) {
    A8 a8 = w.buffer(phase.out).a8(w.rows, w.thread);
    if (a8.rounding == Rounding::kTensor) {
        a8.rounding = phase.scale > 0 ? Rounding::kTensor : Rounding::kToken;
        a8.threshold = phase.scale;
    }
    if (phase.extremes >= 0 && a8.rounding == Rounding::kToken) a8.largest = w.buffer(phase.extremes).floats();
    return a8;
}

// Quantizes rows [first, last) into the phase's output buffer, or into this thread's copy if the buffer is local.
void quantize(const QuantizePhase& phase, Worker& w, int first, int last) {
    const Buffer& out = w.buffer(phase.out);
    const QuantizeKernels& kernels = *w.run.kernels.quantize;
    const A8 a8 = input_of(phase, w);
    auto* scratch = reinterpret_cast<float*>(w.scratch);
    const float* in = w.floats(phase.in);
    const int64_t stride = w.stride(phase.in);
    if (!phase.order.empty()) return quantize_ordered(phase, w, first, last, a8);
    if (a8.blocks) {
        kernels.to_a8(in, stride, first, last, out.width(), phase.norm.view(), scratch, a8);
    } else {
        kernels.to_bf16(in, stride, first, last, out.width(), phase.norm.view(), scratch, out.bf16(w.rows, w.thread));
    }
}

// Adds sin (first half) and cos (second half) of the row's position.
void add_sinusoids(const Worker& w, int number, int r, float* row) {
    const Rope& rope = w.run.ropes[static_cast<size_t>(number)];
    const int half = rope.dim / 2;
    const int64_t at = int64_t{w.run.rows.feeds.positions[static_cast<size_t>(r)]} * half;
    for (int i = 0; i < half; ++i) row[i] += rope.sin.data()[at + i];
    for (int i = 0; i < half; ++i) row[half + i] += rope.cos.data()[at + i];
}

void reduce_row(const ReducePhase& phase, int ranks, const float* const* parts, float* out) {
    const float* bias = phase.bias.empty() ? nullptr : phase.bias.data();
    add_parts(parts, ranks, phase.width, [&](int i, float sum) {
        const float biased = bias ? sum + bias[i] : sum;
        out[i] = phase.add ? out[i] + biased : biased;
    });
}

// Bits of the largest |x|. As integers these bits sort finite values, then infinity, then NaN.
int32_t largest_bits(const float* x, int width) {
    int32_t largest = 0;
    for (int i = 0; i < width; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    return largest;
}

// Whether row r comes after the first separator of its text, which begins at position 0.
bool has_second_type(const EmbedPhase& phase, const Worker& w, int r) {
    const auto& rows = w.run.rows;
    for (auto at = static_cast<size_t>(r); at > 0 && rows.feeds.positions[at] > 0; --at) {
        if (rows.ids[at - 1] == phase.separator) return true;
    }
    return false;
}

void embed_row(const EmbedPhase& phase, const Worker& w, int r, int32_t entry, float* row, float* position_row) {
    w.run.kernels.pack->unpack(phase.table, entry, row);
    if (phase.scale != 1.0f) {
        for (int i = 0; i < phase.table.k; ++i) row[i] *= phase.scale;
    }
    const bool second = phase.separator >= 0 && has_second_type(phase, w, r);
    const std::vector<float>& offset = second ? phase.second : phase.offset;
    for (size_t i = 0; i < offset.size(); ++i) row[i] += offset[i];
    if (phase.sinusoids >= 0) add_sinusoids(w, phase.sinusoids, r, row);
    if (!phase.positions) return;
    w.run.kernels.pack->unpack(*phase.positions, w.run.rows.feeds.positions[static_cast<size_t>(r)], position_row);
    for (int i = 0; i < phase.table.k; ++i) row[i] += position_row[i];
}

// Embeds the tokens of this rank's part of the table, and receives the rows of the others.
void embed_parts(const EmbedPhase& phase, Worker& w, float* position_row) {
    const Buffer& out = w.buffer(phase.out);
    Ranks& ranks = *w.run.ranks;
    const int first_id = phase.borders[static_cast<size_t>(ranks.rank())],
              last_id = phase.borders[static_cast<size_t>(ranks.rank()) + 1];
    auto* mine = reinterpret_cast<float*>(ranks.mine(w.exchange));
    w.share(w.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r) {
            const int32_t id = w.run.rows.ids[static_cast<size_t>(r)];
            if (id >= first_id && id < last_id)
                embed_row(phase, w, r, id - first_id, mine + r * out.stride(), position_row);
        }
    });
    w.share(w.rows, [&](int first, int last) {
        if (!w.meet()) return;
        for (int r = first; r < last; ++r) {
            const int32_t id = w.run.rows.ids[static_cast<size_t>(r)];
            const auto owner =
                std::upper_bound(phase.borders.begin(), phase.borders.end(), id) - phase.borders.begin() - 1;
            const auto* from = reinterpret_cast<const float*>(ranks.of(static_cast<int>(owner), w.exchange));
            copy_rows(from, out.stride(), out.floats(), out.stride(), r, r + 1, out.width());
        }
    });
    ++w.exchange;
}

void run(const EmbedPhase& phase, Worker& w) {
    const Buffer& out = w.buffer(phase.out);
    auto* position_row = reinterpret_cast<float*>(w.scratch);
    if (!phase.borders.empty()) return embed_parts(phase, w, position_row);
    w.share(w.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r) {
            embed_row(phase, w, r, w.run.rows.ids[static_cast<size_t>(r)], out.floats() + r * out.stride(),
                      position_row);
        }
    });
}

void run(const NormPhase& phase, Worker& w) {
    w.share_rows([&](int first, int last) {
        w.run.kernels.quantize->norm(w.floats(phase.in) + first * w.stride(phase.in), w.stride(phase.in), 0,
                                     last - first, phase.width, phase.norm.view(),
                                     w.floats(phase.out) + first * w.stride(phase.out), w.stride(phase.out));
    });
}

void run(const QuantizePhase& phase, Worker& w) {
    const size_t out = static_cast<size_t>(phase.out);
    // A small input is computed by each thread for itself, right before the first use: cheaper than a barrier.
    w.pending_input[out] = w.buffer(phase.out).is_local(w.rows) ? &phase : nullptr;
    if (!w.pending_input[out]) w.share_rows([&](int first, int last) { quantize(phase, w, first, last); });
}

// The wanted blocks of the vocabulary that a head, or a rank's part of it, computes.
std::span<const int32_t> units_of(const LinearPhase& phase, const Worker& w) {
    const int first = phase.out.column / kVocabBlock, count = (phase.linear.n() + kVocabBlock - 1) / kVocabBlock;
    const auto begin = std::lower_bound(w.units.begin(), w.units.end(), first);
    return {begin, std::lower_bound(begin, w.units.end(), first + count)};
}

void run(const LinearPhase& phase, Worker& w) {
    const Buffer& in = w.buffer(phase.in);
    const Buffer& out = w.buffer(phase.out.buffer);
    Epilogue epilogue{};
    epilogue.kind = phase.kind;
    epilogue.act = phase.act;
    epilogue.scale = phase.scale;
    epilogue.softcap = phase.softcap;
    if (out.kind() == BufferKind::kPartial) {
        epilogue.out = reinterpret_cast<float*>(w.run.ranks->mine(w.exchange)) + phase.out.column;
        epilogue.stride = out.stride();
    } else if (out.kind() == BufferKind::kFloat) {
        epilogue.out = out.floats() + phase.out.column;
        epilogue.stride = out.stride();
    } else {
        epilogue.a8 = out.a8(w.rows, w.thread);
        epilogue.bf16 = out.bf16(w.rows, w.thread);
    }
    if (phase.maxima >= 0) {
        epilogue.block_max = w.buffer(phase.maxima).floats() + phase.out.column / kVocabBlock;
        epilogue.max_stride = w.buffer(phase.maxima).stride();
    }
    const std::span<const int32_t> units = phase.maxima >= 0 ? units_of(phase, w) : std::span<const int32_t>{};
    if (phase.maxima >= 0 && units.empty() && !w.units.empty()) return;
    const LinearWork work{&w.run.kernels,
                          &phase.linear,
                          in.a8(w.rows, w.thread),
                          in.bf16(w.rows, w.thread),
                          w.rows,
                          w.run.threads,
                          epilogue,
                          0,
                          &w.fetch,
                          units,
                          phase.out.column / kVocabBlock};
    const QuantizePhase*& pending_input = w.pending_input[static_cast<size_t>(phase.in)];
    w.share(
        linear_items(work),
        [&](int first, int last) {
            if (pending_input) quantize(*pending_input, w, 0, w.rows);
            pending_input = nullptr;
            run_linear_items(work, first, last, w.scratch);
        },
        linear_grain(work));
}

void run(const AdapterPhase& phase, Worker& w) { run_adapters(phase, w); }

void run(const ActPhase& phase, Worker& w) {
    w.share_rows([&](int first, int last) {
        for (int r = first; r < last; ++r) {
            activate(w.run.kernels, phase.kind, w.floats(phase.in) + r * w.stride(phase.in), phase.width,
                     w.floats(phase.out) + r * w.stride(phase.out));
        }
    });
}

void run(const ActMulPhase& phase, Worker& w) {
    w.share_rows([&](int first, int last) {
        for (int r = first; r < last; ++r) {
            const float* gate = w.floats(phase.in) + r * w.stride(phase.in);
            const float* up = gate + phase.width;
            float* out = w.floats(phase.out) + r * w.stride(phase.out);
            if (phase.kind == ActKind::kSilu || phase.kind == ActKind::kGeluTanh) {
                const Activation kind = phase.kind == ActKind::kSilu ? Activation::kSilu : Activation::kGeluTanh;
                w.run.kernels.quantize->act_mul(kind, gate, up, phase.width, out);
                continue;
            }
            activate(w.run.kernels, phase.kind, gate, phase.width, out);
            for (int i = 0; i < phase.width; ++i) out[i] *= up[i];
        }
    });
}

void run(const ResidualPhase& phase, Worker& w) {
    auto* scratch = reinterpret_cast<float*>(w.scratch);
    w.share_rows([&](int first, int last) {
        for (int r = first; r < last; ++r) {
            const float* x = w.floats(phase.x) + r * w.stride(phase.x);
            const float* y = w.floats(phase.y) + r * w.stride(phase.y);
            float* out = w.floats(phase.out) + r * w.stride(phase.out);
            if (phase.post_norm.kind != NormKind::kNone) {
                w.run.kernels.quantize->norm(y, 0, 0, 1, phase.width, phase.post_norm.view(), scratch, 0);
                y = scratch;
            }
            for (int i = 0; i < phase.width; ++i) out[i] = x[i] + y[i];
        }
    });
}

void run(const AttentionPhase& phase, Worker& w) {
    AttentionStep& attention = w.run.kv[static_cast<size_t>(phase.pool)]->attention;
    AttentionLayout& layout = attention.layout(phase.view);
    const Buffer& out = w.buffer(phase.out.buffer);
    AttentionTask task{};
    attention.prepare(layout, phase.layer, task);
    task.q = w.floats(phase.q);
    if (phase.view.stores()) task.k = w.floats(phase.k), task.v = w.floats(phase.v);
    task.stride = w.stride(phase.q);
    if (phase.q_norm.kind != NormKind::kNone)
        task.q_norm = phase.q_norm.weight.data(), task.norm_eps = phase.q_norm.eps;
    if (phase.k_norm.kind != NormKind::kNone)
        task.k_norm = phase.k_norm.weight.data(), task.norm_eps = phase.k_norm.eps;
    const auto table = [&](int number) {
        const Rope& rope = w.run.ropes[static_cast<size_t>(number)];
        return RopeTable{rope.cos.data(), rope.sin.data(), rope.dim, rope.interleaved};
    };
    if (phase.rope >= 0) task.rope = table(phase.rope), task.q_rope = task.rope;
    if (phase.q_rope >= 0) task.q_rope = table(phase.q_rope);
    task.scale = phase.scale;
    task.softcap = phase.softcap;
    task.sinks = phase.sinks.empty() ? nullptr : phase.sinks.data();
    task.k_shift = phase.k_shift.empty() ? nullptr : phase.k_shift.data();
    task.bias = {phase.bias.empty() ? nullptr : phase.bias.data(), phase.bias_most};
    if (out.kind() == BufferKind::kFloat) {
        task.out = out.floats() + phase.out.column;
        task.out_stride = out.stride();
    } else {
        task.a8 = out.a8(w.rows, w.thread);
        task.bf16 = out.bf16(w.rows, w.thread);
    }
    auto* scratch = reinterpret_cast<float*>(w.scratch);
    if (!layout.fused()) {
        w.share(attention.appends(), [&](int first, int last) {
            for (int job = first; job < last; ++job) attention.append_job(task, job, scratch);
        });
    }
    if (w.run.rows.fill) return;
    w.deal(layout.items(), [&](int item, int next) { attention.attend_item(layout, task, item, next, scratch); });
    w.fetch = attention.fetch_list(layout, phase.layer + 1, w.thread);
}

void run(const StorePhase& phase, Worker& w) {
    const AttentionStep& attention = w.run.kv[static_cast<size_t>(phase.pool)]->attention;
    AttentionTask task{};
    attention.prepare(phase.layer, task);
    task.k = w.floats(phase.k);
    task.v = w.floats(phase.v);
    task.stride = w.stride(phase.k);
    auto* scratch = reinterpret_cast<float*>(w.scratch);
    w.share(attention.appends(), [&](int first, int last) {
        for (int job = first; job < last; ++job) attention.append_job(task, job, scratch);
    });
}

void run(const TapPhase& phase, Worker& w) {
    const std::span<float* const> taps = w.run.taps;
    if (static_cast<size_t>(phase.tap) >= taps.size() || !taps[static_cast<size_t>(phase.tap)]) return;
    w.share(w.rows, [&](int first, int last) {
        copy_rows(w.floats(phase.in), w.stride(phase.in), taps[static_cast<size_t>(phase.tap)], phase.width, first,
                  last, phase.width);
    });
}

void run(const CopyPhase& phase, Worker& w) {
    w.share_rows([&](int first, int last) {
        copy_rows(w.floats(phase.in), w.stride(phase.in), w.floats(phase.out), w.stride(phase.out), first, last,
                  phase.width);
    });
}

void run(const ScatterPhase& phase, Worker& w) {
    constexpr int kPiece = 64 * kVocabBlock;
    const int pieces = (phase.vocab_size + kPiece - 1) / kPiece;
    w.share(w.rows * pieces, [&](int first, int last) {
        for (int item = first; item < last; ++item) {
            const int row = item / pieces, start = item % pieces * kPiece,
                      end = std::min(start + kPiece, phase.vocab_size);
            const float* in = w.floats({phase.in, 0}) + row * w.stride({phase.in, 0});
            float* out = w.floats({phase.out, 0}) + row * w.stride({phase.out, 0});
            std::fill(out + start, out + end, -std::numeric_limits<float>::infinity());
            for (auto id = std::lower_bound(phase.ids.begin(), phase.ids.end(), start);
                 id != phase.ids.end() && *id < end; ++id) {
                out[*id] = in[id - phase.ids.begin()];
            }
            float* maxima = w.floats({phase.maxima, 0}) + row * w.stride({phase.maxima, 0}) + start / kVocabBlock;
            w.run.kernels.sample->block_maxima(out + start, end - start, maxima);
        }
    });
}

void run(const ReducePhase& phase, Worker& w) {
    const Ranks& ranks = *w.run.ranks;
    const int64_t stride = w.buffer(phase.partial).stride();
    w.share_rows([&](int first, int last) {
        if (!w.meet()) return;
        for (int r = first; r < last; ++r) {
            const float* parts[kMostRanks];
            for (int rank = 0; rank < ranks.world(); ++rank)
                parts[rank] = reinterpret_cast<const float*>(ranks.of(rank, w.exchange)) + r * stride;
            reduce_row(phase, ranks.world(), parts, w.floats(phase.out) + r * w.stride(phase.out));
        }
    });
    ++w.exchange;
}

void run(const GatherPhase& phase, Worker& w) {
    const Buffer& buffer = w.buffer(phase.buffer);
    if (buffer.common()) {
        w.share(1, [&](int, int) { w.meet(); });
        ++w.exchange;
    } else if (w.run.splits) {
        gather_rows(buffer, w);
    }
}

void run(const ExtremePhase& phase, Worker& w) {
    const Ranks& ranks = *w.run.ranks;
    auto* mine = reinterpret_cast<int32_t*>(ranks.mine(w.exchange));
    auto* out = reinterpret_cast<int32_t*>(w.buffer(phase.out).floats());
    w.share(w.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r)
            mine[r] = largest_bits(w.floats(phase.in) + r * w.stride(phase.in), phase.width);
    });
    w.share(w.rows, [&](int first, int last) {
        if (!w.meet()) return;
        for (int r = first; r < last; ++r) {
            out[r] = 0;
            for (int rank = 0; rank < ranks.world(); ++rank)
                out[r] = std::max(out[r], reinterpret_cast<const int32_t*>(ranks.of(rank, w.exchange))[r]);
        }
    });
    ++w.exchange;
}

}  // namespace

void gather_rows(const Buffer& buffer, Worker& w) {
    const Ranks& ranks = *w.run.ranks;
    const size_t bytes = buffer.row_bytes();
    uint8_t* rows = buffer.input() ? buffer.rows() : reinterpret_cast<uint8_t*>(buffer.floats());
    const int start = w.first_row_of(ranks.rank()), end = w.first_row_of(ranks.rank() + 1);
    w.share(end - start, [&](int first, int last) {
        const size_t at = static_cast<size_t>(start + first) * bytes;
        std::memcpy(ranks.mine(w.exchange) + at, rows + at, static_cast<size_t>(last - first) * bytes);
    });
    w.share(ranks.world(), [&](int first, int last) {
        if (!w.meet()) return;
        for (int rank = first; rank < last; ++rank) {
            if (rank == ranks.rank()) continue;
            const size_t at = static_cast<size_t>(w.first_row_of(rank)) * bytes;
            std::memcpy(rows + at, ranks.of(rank, w.exchange) + at,
                        static_cast<size_t>(w.first_row_of(rank + 1)) * bytes - at);
        }
    });
    ++w.exchange;
}

void run_phase(const Phase& phase, Worker& worker) {
    const bool splits = phase.by_rows && worker.run.splits;
    worker.first_row = splits ? worker.first_row_of(worker.run.ranks->rank()) : 0;
    worker.last_row = splits ? worker.first_row_of(worker.run.ranks->rank() + 1) : worker.rows;
    std::visit([&](const auto& work) { run(work, worker); }, phase.work);
}

int turns_of(const Phase& phase) {
    const auto* embed = std::get_if<EmbedPhase>(&phase.work);
    const bool two = std::holds_alternative<AttentionPhase>(phase.work) ||
                     std::holds_alternative<GatherPhase>(phase.work) ||
                     std::holds_alternative<AdapterPhase>(phase.work) ||
                     std::holds_alternative<ExtremePhase>(phase.work) || (embed && !embed->borders.empty());
    return two ? 2 : 1;
}

size_t scratch_bytes(const Phase& phase) {
    const auto floats = [](int width) { return (static_cast<size_t>(width) + 16) * sizeof(float); };
    return std::visit(Overloaded{
                          [&](const EmbedPhase& work) { return floats(work.table.k); },
                          [&](const QuantizePhase& work) {
                              return floats(static_cast<int>(work.norm.weight.size())) +
                                     floats(static_cast<int>(work.order.size()));
                          },
                          [&](const ResidualPhase& work) { return floats(work.width); },
                          [&](const LinearPhase&) { return kLinearScratchBytes; },
                          [&](const auto&) { return size_t{0}; },
                      },
                      phase.work);
}

}  // namespace headrace
