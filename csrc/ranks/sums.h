// Sums of the parts of 1, 2, 4 or 8 ranks, joined as a tree: ((0+1)+(2+3))+((4+5)+(6+7)), the order in which a linear
// layer joins its segments.
#pragma once

namespace headrace {

template <int count>
float joined(const float* const* parts, int i) {
    if constexpr (count == 1) {
        return parts[0][i];
    } else {
        return joined<count / 2>(parts, i) + joined<count / 2>(parts + count / 2, i);
    }
}

// Calls put(i, sum) for i in [0, width).
template <class F>
void add_parts(const float* const* parts, int ranks, int width, F put) {
    const auto all = [&]<int count>() {
        for (int i = 0; i < width; ++i) put(i, joined<count>(parts, i));
    };
    switch (ranks) {
        case 1:
            return all.template operator()<1>();
        case 2:
            return all.template operator()<2>();
        case 4:
            return all.template operator()<4>();
        default:
            return all.template operator()<8>();
    }
}

}  // namespace headrace
