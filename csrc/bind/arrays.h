// Helpers of the bindings: numpy arrays, argument checks, and the choice of kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "linear/quantize_act_kernels.h"
#include "system/kernels.h"

namespace headrace {

using Floats = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using FloatVector = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Bfloats = nanobind::ndarray<const uint16_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Array = nanobind::ndarray<nanobind::numpy, T>;

inline void require(bool ok, const std::string& message) {
    if (!ok) throw nanobind::value_error(message.c_str());
}

// The kernels of the named instruction set; of the one in use if the name is empty.
inline const Kernels& kernels_named(const std::string& isa) {
    return isa.empty() ? kernels() : kernels_for(parse_isa(isa));
}

inline Rounding rounding_named(const std::string& name) {
    require(name == "group" || name == "token" || name == "split" || name == "tensor",
            "activations must be group, token, split or tensor, not " + name);
    return name == "group"   ? Rounding::kGroup
           : name == "token" ? Rounding::kToken
           : name == "split" ? Rounding::kSplit
                             : Rounding::kTensor;
}

// A new array of zeros, and a pointer to its values.
template <class T>
std::pair<T*, Array<T>> new_array(std::initializer_list<size_t> shape) {
    size_t count = 1;
    for (const size_t n : shape) count *= n;
    T* data = new T[count]();
    const nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {data, Array<T>(data, shape, owner)};
}

}  // namespace headrace
