#include "program/profile.h"

#include "pack/pack.h"

namespace headrace {
namespace {

// Bytes of one row of an access.
double row_bytes(const Access& access, const Buffer& buffer) {
    switch (buffer.kind()) {
        case BufferKind::kA8:
            return static_cast<double>(a8_bytes(1, static_cast<int32_t>(access.width)));
        case BufferKind::kBf16:
            return static_cast<double>(access.width) * sizeof(uint16_t);
        default:
            return static_cast<double>(access.width) * sizeof(float);
    }
}

double tensor_bytes(const PackedTensor& tensor) {
    return static_cast<double>(row_block_bytes(tensor.kind, tensor.k)) * tensor.row_blocks();
}

// Bytes of one row; a packed row block has 16.
double lookup_bytes(const PackedTensor& table) {
    return static_cast<double>(row_block_bytes(table.kind, table.k)) / 16;
}

// Visitor for the costs that depend on the kind of phase. `cost_of` adds the activations.
struct CostOf {
    int rows;
    const ProgramShape& shape;
    const Kernels& kernels;

    PhaseCost operator()(const LinearPhase& work) const {
        const PackedLinear& linear = work.linear;
        PhaseCost cost;
        for (const PackedTensor& part : linear.parts()) {
            const std::string kind(packed_kind_name(part.kind));
            if (cost.kernel.find(kind) == std::string::npos) cost.kernel += (cost.kernel.empty() ? "" : "+") + kind;
            cost.weights += tensor_bytes(part);
            cost.macs += static_cast<double>(part.n) * part.k * rows;
        }
        const bool panels = !linear.bf16() && rows > direct_rows_of(linear, kernels);
        cost.kernel += panels ? " panels" : " direct";
        cost.products = linear.bf16() ? Products::kBf16 : Products::kInt8;
        return cost;
    }

    PhaseCost operator()(const AttentionPhase& work) const {
        KVGroup& kv = *shape.kv[static_cast<size_t>(work.pool)];
        const auto [bytes, macs] = kv.attention.layout(work.view).touches();
        switch (kv.pool->shape().type) {
            case KVType::kBf16:
                return {"attention bf16", bytes, 0, macs, Products::kBf16};
            case KVType::kInt8:  // queries and weights have two bytes, so two products for each
                return {"attention int8", bytes, 0, 2 * macs, Products::kInt8};
            case KVType::kInt4:
                return {"attention int4", bytes, 0, 2 * macs, Products::kInt8};
            default:
                return {"attention f32", bytes, 0, macs, Products::kF32};
        }
    }

    PhaseCost operator()(const EmbedPhase& work) const {
        const double bytes = lookup_bytes(work.table) + (work.positions ? lookup_bytes(*work.positions) : 0);
        return {"embed", bytes * rows};
    }

    PhaseCost operator()(const NormPhase&) const { return {"norm"}; }
    PhaseCost operator()(const QuantizePhase&) const { return {"quantize"}; }
    PhaseCost operator()(const ActPhase&) const { return {"act"}; }
    PhaseCost operator()(const ActMulPhase&) const { return {"act_mul"}; }
    PhaseCost operator()(const ResidualPhase&) const { return {"residual"}; }
    PhaseCost operator()(const StorePhase&) const { return {"store"}; }
    PhaseCost operator()(const TapPhase&) const { return {"copy"}; }
    PhaseCost operator()(const CopyPhase&) const { return {"copy"}; }
    PhaseCost operator()(const ScatterPhase&) const { return {"scatter"}; }
    PhaseCost operator()(const ReducePhase&) const { return {"reduce"}; }
    PhaseCost operator()(const GatherPhase&) const { return {"gather"}; }
    PhaseCost operator()(const ExtremePhase&) const { return {"extreme"}; }
    PhaseCost operator()(const AdapterPhase&) const { return {"adapter"}; }
};

}  // namespace

const char* products_name(Products products) {
    constexpr const char* kNames[] = {"", "int8", "bf16", "f32"};
    return kNames[static_cast<int>(products)];
}

PhaseCost cost_of(const Phase& phase, SegmentKind segment, int rows, const ProgramShape& shape,
                  const Kernels& kernels) {
    PhaseCost cost = std::visit(CostOf{rows, shape, kernels}, phase.work);
    for (const Access& access : needs_of(phase, segment, shape))
        cost.rows += row_bytes(access, shape.buffer(access.place.buffer)) * rows;
    return cost;
}

void Profile::begin(int threads, size_t visits) {
    visits_.resize(static_cast<size_t>(threads));
    for (std::vector<Visit>& each : visits_) {
        each.clear();
        each.reserve(visits);
    }
}

void Profile::end(int rows, double prepared, const ProgramShape& shape, const Kernels& kernels) {
    const double threads = static_cast<double>(visits_.size());
    ProfileEntry& before = entries_[{rows, "prepare", ""}];
    before.calls += 1, before.seconds += prepared, before.idle += prepared * (threads - 1) / threads;
    for (size_t i = 0; i < visits_.front().size(); ++i) {
        const Visit& visit = visits_.front()[i];
        const PhaseCost cost =
            visit.phase ? cost_of(*visit.phase, visit.segment, visit.rows, shape, kernels) : PhaseCost{};
        ProfileEntry& entry = entries_[{rows, visit.phase ? visit.phase->name : visit.name, cost.kernel}];
        entry.calls += 1;
        entry.seconds += visit.seconds;
        for (const auto& each : visits_) {  // a thread that missed the step was idle all the time
            entry.idle += (i < each.size() ? each[i].seconds - each[i].busy : visit.seconds) / threads;
        }
        entry.weights += cost.weights;
        entry.rows += cost.rows;
        entry.macs += cost.macs;
        entry.products = cost.products;
    }
}

}  // namespace headrace
