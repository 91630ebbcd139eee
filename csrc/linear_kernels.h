#pragma once
#include <stdint.h>
namespace headrace {
struct LinearKernels { int placeholder; };
}
