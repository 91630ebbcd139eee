#include "program/phases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pack/kernels.h"

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

void run(const EmbedPhase& phase, Worker& w) {
    const Buffer& out = w.buffer(phase.out);
    auto* position_row = reinterpret_cast<float*>(w.scratch);
    w.share(w.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r) {
            float* row = out.floats() + r * out.stride();
            w.run.kernels.pack->unpack(phase.table, w.run.rows.ids[static_cast<size_t>(r)], row);
            if (phase.scale != 1.0f) {
                for (int i = 0; i < phase.table.k; ++i) row[i] *= phase.scale;
            }
            for (size_t i = 0; i < phase.offset.size(); ++i) row[i] += phase.offset[i];
            if (phase.sinusoids >= 0) add_sinusoids(w, phase.sinusoids, r, row);
            if (!phase.positions) continue;
            w.run.kernels.pack->unpack(*phase.positions, w.run.rows.feeds.positions[static_cast<size_t>(r)],
                                       position_row);
            for (int i = 0; i < phase.table.k; ++i) row[i] += position_row[i];
        }
    });
}

void run(const NormPhase& phase, Worker& w) {
    w.share(w.rows, [&](int first, int last) {
        w.run.kernels.quantize->norm(w.floats(phase.in) + first * w.stride(phase.in), w.stride(phase.in), 0,
                                     last - first, phase.width, phase.norm.view(),
                                     w.floats(phase.out) + first * w.stride(phase.out), w.stride(phase.out));
    });
}

void run(const QuantizePhase& phase, Worker& w) {
    const size_t out = static_cast<size_t>(phase.out);
    // A small input is computed by each thread for itself, right before the first use: cheaper than a barrier.
    w.pending_input[out] = w.buffer(phase.out).is_local(w.rows) ? &phase : nullptr;
    if (!w.pending_input[out]) w.share(w.rows, [&](int first, int last) { quantize(phase, w, first, last); });
}

void run(const LinearPhase& phase, Worker& w) {
    const Buffer& in = w.buffer(phase.in);
    const Buffer& out = w.buffer(phase.out.buffer);
    Epilogue epilogue{};
    epilogue.kind = phase.kind;
    epilogue.act = phase.act;
    epilogue.scale = phase.scale;
    epilogue.softcap = phase.softcap;
    if (out.kind() == BufferKind::kFloat) {
        epilogue.out = out.floats() + phase.out.column;
        epilogue.stride = out.stride();
    } else {
        epilogue.a8 = out.a8(w.rows, w.thread);
        epilogue.bf16 = out.bf16(w.rows, w.thread);
    }
    if (phase.maxima >= 0) {
        epilogue.block_max = w.buffer(phase.maxima).floats();
        epilogue.max_stride = w.buffer(phase.maxima).stride();
    }
    const LinearWork work{&w.run.kernels,
                          &phase.linear,
                          in.a8(w.rows, w.thread),
                          in.bf16(w.rows, w.thread),
                          w.rows,
                          w.run.threads,
                          epilogue,
                          0,
                          &w.fetch,
                          phase.maxima >= 0 ? w.units : std::span<const int32_t>{}};
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

void run(const ActPhase& phase, Worker& w) {
    w.share(w.rows, [&](int first, int last) {
        for (int r = first; r < last; ++r) {
            activate(w.run.kernels, phase.kind, w.floats(phase.in) + r * w.stride(phase.in), phase.width,
                     w.floats(phase.out) + r * w.stride(phase.out));
        }
    });
}

void run(const ActMulPhase& phase, Worker& w) {
    w.share(w.rows, [&](int first, int last) {
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
    w.share(w.rows, [&](int first, int last) {
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
    AttentionStep& attention = w.run.attention;
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
    if (phase.rope >= 0) {
        const Rope& rope = w.run.ropes[static_cast<size_t>(phase.rope)];
        task.rope = {rope.cos.data(), rope.sin.data(), rope.dim, rope.interleaved};
    }
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
    const AttentionStep& attention = w.run.attention;
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
    w.share(w.rows, [&](int first, int last) {
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

}  // namespace

void run_phase(const Phase& phase, Worker& worker) {
    std::visit([&](const auto& work) { run(work, worker); }, phase.work);
}

int turns_of(const Phase& phase) { return std::holds_alternative<AttentionPhase>(phase.work) ? 2 : 1; }

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
