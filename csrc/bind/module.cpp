// The Python module headrace.core._core. Every call checks its arguments. Long calls (steps, packing, linear layers,
// attention, draws, copies of blocks) release the GIL; short calls, most of them for tests, keep it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>

#include "bind/bind.h"
#include "pack/dequant.h"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void dequantize(std::string_view kind, const Bytes& data, const Floats& out, int threads) {
    const headrace::Format* format = headrace::find_format(kind);
    if (!format) throw nb::value_error(("unknown tensor type " + std::string(kind)).c_str());
    const size_t blocks = data.size() / format->block_bytes;
    if (data.size() % format->block_bytes != 0 || out.size() % format->block != 0 ||
        out.size() / format->block != blocks) {
        throw nb::value_error("data and out do not hold the same number of whole blocks");
    }
    const nb::gil_scoped_release unlocked;
    headrace::dequantize(*format, data.data(), out.data(), blocks, threads);
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "The native core of Headrace";
    // A thread that still runs when the interpreter exits keeps its objects, which nanobind would report as leaks.
    nb::set_leak_warnings(false);
    m.def(
        "set_leak_warnings", [](bool on) { nb::set_leak_warnings(on); }, nb::arg("on"),
        "Whether objects that outlive the interpreter are listed on stderr (default: no).");
    m.def(
        "dequantize", &dequantize, nb::arg("kind"), nb::arg("data").noconvert(), nb::arg("out").noconvert(),
        nb::arg("threads") = 1,
        "Decode stored blocks (uint8 [bytes]) into float32 (out [elements]). Raises ValueError for an unknown kind or "
        "sizes that do not belong together.");
    headrace::bind_attention(m);
    headrace::bind_pack(m);
    headrace::bind_probe(m);
    headrace::bind_linear(m);
    headrace::bind_sample(m);
    headrace::bind_step(m);
    headrace::bind_ranks(m);
    headrace::bind_program(m);
}
