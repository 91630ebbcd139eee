#include "program/commands.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "program/program.h"
#include "ranks/ranks.h"

namespace headrace {
namespace {

constexpr size_t kAligned = 8;

size_t aligned(size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

// The fields of a command that are no arrays.
struct Header {
    Command kind;
    int32_t program;
    int32_t table_width, source_width, window_width, pool;
    int32_t first_layer, last_layer;
    int32_t fill, has_hidden, split;
};

// Each array: its number of elements in 8 bytes, then the elements, padded to 8 bytes.
class Writer {
public:
    explicit Writer(std::span<uint8_t> message) : message_(message) {}

    void put(const Header& header) { put_bytes(&header, sizeof header); }
    template <class T>
    void put(std::span<const T> values) {
        const uint64_t count = values.size();
        put_bytes(&count, sizeof count);
        put_bytes(values.data(), values.size_bytes());
    }
    size_t size() const { return at_; }

private:
    void put_bytes(const void* from, size_t bytes) {
        if (bytes > message_.size() || at_ > message_.size() - aligned(bytes))
            throw std::invalid_argument("a command to the ranks does not fit the " + std::to_string(message_.size()) +
                                        " bytes that their region has for it");
        if (bytes) std::memcpy(message_.data() + at_, from, bytes);
        at_ += aligned(bytes);
    }

    std::span<uint8_t> message_;
    size_t at_ = 0;
};

class Reader {
public:
    explicit Reader(std::span<const uint8_t> message) : message_(message) {}

    Header header() {
        Header header;
        std::memcpy(&header, take(sizeof header), sizeof header);
        return header;
    }
    template <class T>
    std::span<const T> values() {
        uint64_t count;
        std::memcpy(&count, take(sizeof count), sizeof count);
        if (count > message_.size() / sizeof(T)) refuse();
        return {reinterpret_cast<const T*>(take(count * sizeof(T))), count};
    }

private:
    [[noreturn]] static void refuse() { throw std::invalid_argument("a command of another version of the core"); }

    const uint8_t* take(size_t bytes) {
        if (bytes > message_.size() || at_ > message_.size() - aligned(bytes)) refuse();
        const uint8_t* from = message_.data() + at_;
        at_ += aligned(bytes);
        return from;
    }

    std::span<const uint8_t> message_;
    size_t at_ = 0;
};

}  // namespace

size_t write_rows(const StepRows& rows, int hidden, int number, std::span<uint8_t> message) {
    const StepFeeds& feeds = rows.feeds;
    Writer writer(message);
    writer.put({Command::kRun, number, feeds.table_width, feeds.source_width, feeds.window_width, 0, rows.first_layer,
                rows.last_layer, rows.fill, rows.hidden != nullptr, rows.split});
    for (const auto& each : {rows.ids, feeds.positions, feeds.row_start, feeds.kv_start, feeds.known, feeds.tables,
                             feeds.sources, feeds.source_tables, feeds.window_tables, rows.head_rows, rows.units})
        writer.put(each);
    writer.put(feeds.masks);
    writer.put(rows.chunks);
    writer.put(rows.skips);
    if (rows.hidden) writer.put(std::span(rows.hidden, rows.ids.size() * static_cast<size_t>(hidden)));
    return writer.size();
}

size_t write_pairs(Command command, KVPool::Pairs pairs, int pool, int number, std::span<uint8_t> message) {
    Writer writer(message);
    Header header{};
    header.kind = command, header.program = number, header.pool = pool;
    writer.put(header);
    writer.put(pairs);
    return writer.size();
}

ReadCommand::ReadCommand(std::span<const uint8_t> message) {
    Reader reader(message);
    const Header header = reader.header();
    kind = header.kind, program = header.program;
    if (kind != Command::kRun) {
        pairs = reader.values<std::pair<int32_t, int32_t>>();
        pool = header.pool;
        return;
    }
    StepFeeds& feeds = rows.feeds;
    for (auto* each : {&rows.ids, &feeds.positions, &feeds.row_start, &feeds.kv_start, &feeds.known, &feeds.tables,
                       &feeds.sources, &feeds.source_tables, &feeds.window_tables, &rows.head_rows, &rows.units})
        *each = reader.values<int32_t>();
    feeds.masks = reader.values<uint64_t>();
    rows.chunks = reader.values<HeadChunk>();
    rows.skips = reader.values<uint8_t>();
    feeds.table_width = header.table_width, feeds.source_width = header.source_width;
    feeds.window_width = header.window_width;
    rows.first_layer = header.first_layer, rows.last_layer = header.last_layer;
    rows.fill = header.fill != 0, rows.split = header.split != 0;
    if (header.has_hidden) rows.hidden = reader.values<float>().data();
}

void follow(Ranks& ranks, std::span<Program* const> programs) {
    for (;;) {
        const std::span<const uint8_t> message = ranks.receive();
        if (message.empty()) return;
        try {
            const auto number = static_cast<size_t>(ReadCommand(message).program);
            if (number >= programs.size())
                throw std::invalid_argument("the leader names program " + std::to_string(number) + " of " +
                                            std::to_string(programs.size()));
            programs[number]->obey(message);
        } catch (...) {
            ranks.give_up();
            throw;
        }
        ranks.finish();
    }
}

}  // namespace headrace
