// Reference hashes of results that have the same bits on every machine and instruction set. Each line of bits.txt is
// "NAME NUMBER HASH".
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <utility>

#include "check.h"
#include "system/isa.h"

namespace headrace::test {

// Random multiples of 1/16, because normal distributions differ between C++ libraries.
inline std::vector<float> even_floats(std::mt19937& rng, size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(below(rng, 257) - 128) / 16.0f;
    return values;
}

// FNV-1a hash of the added data.
class Hash {
public:
    template <class T>
    Hash& add(const T* values, size_t count) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(values);
        for (size_t i = 0; i < count * sizeof(T); ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3;
        return *this;
    }
    template <class T>
    Hash& add(const std::vector<T>& values) {
        return add(values.data(), values.size());
    }
    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325;
};

class Bits {
public:
    Bits() {
        std::ifstream file(HEADRACE_BITS);
        std::string name;
        int number = 0;
        for (uint64_t hash = 0; file >> name >> std::dec >> number >> std::hex >> hash;) wanted_[{name, number}] = hash;
    }

    // `of(isa)`: the hash of an instruction set's result.
    template <class F>
    void compare(const std::string& name, int number, F of) {
        for (const Isa isa : supported_isas()) compare(name, number, isa, of(isa));
    }

    // Prints a different hash in the format of the file.
    void compare(const std::string& name, int number, Isa isa, uint64_t got) {
        if (holds(name, number, got)) return;
        const auto hash = static_cast<unsigned long long>(got);
        std::printf("%s %d %016llx  (%s)\n", name.c_str(), number, hash, isa_name(isa).data());
        known_ = false;
    }

    bool holds(const std::string& name, int number, uint64_t hash) const {
        const auto found = wanted_.find({name, number});
        return found != wanted_.end() && found->second == hash;
    }

    void finish() const { require(known_, "bits are not those of tests/native/bits.txt"); }

private:
    std::map<std::pair<std::string, int>, uint64_t> wanted_;
    bool known_ = true;
};

}  // namespace headrace::test
