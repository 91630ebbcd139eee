// Memory nodes (NUMA) of the machine: their CPUs, and the placement of memory on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace headrace::os {

// Lets a thread run on these CPUs alone.
void pin(std::thread& thread, const std::vector<int>& cpus);

// number: of the system, or -1 for a pretended node, which has no memory of its own. cpus: that this process may use,
// ascending.
struct Node {
    int number;
    std::vector<int> cpus;
};

// The nodes with CPUs of `allowed`; one node if the system reports none. pretended: if above 1,
// the number of nodes to return instead, with equal parts of `allowed` in order.
inline constexpr const char* kNodes = "/sys/devices/system/node";
std::vector<Node> find_nodes(const std::vector<int>& allowed, int pretended, const std::string& root = kNodes);

// The nodes of this process now, and at the first call of `nodes`. The environment variable HEADRACE_NODES (2 to 8)
// pretends nodes.
std::vector<Node> current_nodes();
const std::vector<Node>& nodes();

// Asks the system to take the whole 2 MB pages of this memory, which it has not provided yet, from a node, or from all
// nodes in turn. Without effect for pretended nodes, and where the system refuses.
void place_on(const Node& node, void* memory, size_t bytes);
void interleave(const std::vector<Node>& nodes, void* memory, size_t bytes);

}  // namespace headrace::os

namespace headrace {

// The first of `count` items, in order, that belongs to a node, if nodes have equal parts. node = nodes: `count`.
constexpr int64_t first_of_node(int64_t count, int node, int nodes) { return (count * node + nodes - 1) / nodes; }

// The part of a tensor's bytes on each node: borders between row blocks, moved down to whole 2 MB pages. Returns
// nodes + 1 addresses, or none for tensors that stay together: below kLeastSpread bytes, or one node.
inline constexpr size_t kLeastSpread = size_t{4} << 20;
std::vector<uintptr_t> node_borders(const void* data, int64_t stride, int64_t blocks, int nodes);

}  // namespace headrace
