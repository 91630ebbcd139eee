// Each function adds one part to the Python module; module.cpp calls all of them.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace {

void bind_attention(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_pack(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_step(nanobind::module_& m);

}  // namespace headrace
