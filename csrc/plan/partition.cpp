#include "plan/partition.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace megatron_sb::plan {
namespace {

constexpr const char* kLayoutNames[] = {"zigzag", "contiguous", "balanced"};
constexpr const char* kPackingNames[] = {"per_document", "whole_stream"};

template <size_t kCount>
int parse_name(const char* argument, const std::string& name, const char* const (&names)[kCount]) {
    std::string choices;
    for (size_t i = 0; i < kCount; ++i) {
        if (name == names[i]) return static_cast<int>(i);
        choices += concat(i == 0 ? "" : i + 1 < kCount ? ", " : " or ", '"', names[i], '"');
    }
    throw InvalidArgument(concat(argument, " must be ", choices, ", got \"", name, "\""));
}

void check_cu_seqlens(const std::vector<int64_t>& cu_seqlens, int64_t seq_len) {
    if (cu_seqlens.empty()) throw InvalidArgument("cu_seqlens must have documents + 1 entries, got none");
    if (cu_seqlens[0] != 0) throw InvalidArgument(concat("cu_seqlens[0] must be 0, got ", cu_seqlens[0]));
    for (size_t i = 1; i < cu_seqlens.size(); ++i) {
        if (cu_seqlens[i] < cu_seqlens[i - 1]) {
            throw InvalidArgument(concat("cu_seqlens must not decrease, got cu_seqlens[", i - 1,
                                         "] = ", cu_seqlens[i - 1], " and cu_seqlens[", i, "] = ", cu_seqlens[i]));
        }
    }
    if (cu_seqlens.back() > seq_len) {
        throw InvalidArgument(concat("cu_seqlens must end at most at seq_len, ", seq_len, ", got ", cu_seqlens.back()));
    }
}

void append(std::vector<Piece>& pieces, int document, int64_t document_begin, int64_t from, int64_t to) {
    if (from >= to) return;
    const int32_t begin = pieces.empty() ? 0 : pieces.back().begin + pieces.back().length;
    pieces.push_back({document, static_cast<int32_t>(from - document_begin), static_cast<int32_t>(from), begin,
                      static_cast<int32_t>(to - from)});
}

}  // namespace

int64_t sum_of_rows(const char* what, const std::vector<int64_t>& rows) {
    int64_t sum = 0;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
        if (rows[rank] < 0 || rows[rank] > std::numeric_limits<int32_t>::max()) {
            throw InvalidArgument(concat(what, " must be from 0 to 2^31 - 1, got ", rows[rank], " on rank ", rank));
        }
        sum += rows[rank];
    }
    return sum;
}

Layout parse_layout(const std::string& name) {
    return static_cast<Layout>(parse_name("layout", name, kLayoutNames));
}
Packing parse_packing(const std::string& name) {
    return static_cast<Packing>(parse_name("packing", name, kPackingNames));
}
const char* name_of(Layout layout) {
    return kLayoutNames[static_cast<int>(layout)];
}
const char* name_of(Packing packing) {
    return kPackingNames[static_cast<int>(packing)];
}

Partition::Partition(Layout layout, Packing packing, int size, int64_t seq_len,
                     const std::optional<std::vector<int64_t>>& cu_seqlens)
    : layout_(layout), packing_(packing), size_(size) {
    if (size < 1 || size > kMaxRanks) {
        throw InvalidArgument(
            concat("the size of a context-parallel group must be from 1 to ", kMaxRanks, ", got ", size));
    }
    if (seq_len < 1 || seq_len > std::numeric_limits<int32_t>::max()) {
        throw InvalidArgument(concat("seq_len must be from 1 to 2^31 - 1, got ", seq_len));
    }
    if (cu_seqlens) check_cu_seqlens(*cu_seqlens, seq_len);
    bounds_ = cu_seqlens.value_or(std::vector<int64_t>{0, seq_len});
    num_documents_ = static_cast<int>(bounds_.size()) - 1;
    const std::vector<int64_t> documents = bounds_;
    if (bounds_.back() < seq_len) bounds_.push_back(seq_len);
    num_parts_ = num_chunks();
    int next = 0;
    for (size_t i = 0; i + 1 < bounds_.size(); ++i) {
        first_longer_part_.push_back(next);
        next = static_cast<int>((next + (bounds_[i + 1] - bounds_[i])) % num_parts_);
    }
    if (layout == Layout::kBalanced) spans_ = balanced_spans(documents, seq_len, size);
    count_local_rows();
}

Partition Partition::over(int size) const {
    Partition other = *this;
    other.size_ = size;
    other.spans_.clear();
    for (const Span& span : spans_) {
        const int rank = span.rank / (size_ / size);
        if (!other.spans_.empty() && other.spans_.back().rank == rank) {
            other.spans_.back().end = span.end;
        } else {
            other.spans_.push_back({span.begin, span.end, rank});
        }
    }
    other.count_local_rows();
    return other;
}

void Partition::count_local_rows() {
    local_rows_.assign(size_, 0);
    for (int rank = 0; rank < size_; ++rank) {
        for (const int held : chunks_of(rank)) local_rows_[rank] += num_chunk_rows(held);
    }
}

int64_t Partition::num_chunk_rows(int chunk) const {
    const int parts = num_parts_ / num_chunks();  // in a chunk
    if (layout_ != Layout::kBalanced) return rows_before((chunk + 1) * parts) - rows_before(chunk * parts);
    int64_t rows = 0;
    for (const Span& span : spans_) {
        if (span.rank == chunk) rows += span.end - span.begin;
    }
    return rows;
}

// The documents deal their longer parts in turn, so the parts have as many rows as those of one document.
int64_t Partition::rows_before(int part) const {
    return part * (num_rows() / num_parts_) + std::min<int64_t>(part, num_rows() % num_parts_);
}

int64_t Partition::part_begin(size_t document, int part) const {
    const int64_t begin = bounds_[document], length = bounds_[document + 1] - begin;
    const int longer = static_cast<int>(length % num_parts_), first = first_longer_part_[document];
    // The longer parts are first, first + 1, ..., counted modulo num_parts_.
    const int wrapped = std::max(first + longer - num_parts_, 0);
    return begin + part * (length / num_parts_) + std::clamp(part - first, 0, longer - wrapped) +
           std::min(part, wrapped);
}

std::vector<int> Partition::chunks_of(int rank) const {
    if (layout_ == Layout::kZigzag) return {rank, 2 * size_ - 1 - rank};
    return {rank};
}

std::vector<Piece> Partition::stream() const {
    std::vector<Piece> pieces;
    for (size_t i = 0; i + 1 < bounds_.size(); ++i) append(pieces, i, bounds_[i], bounds_[i], bounds_[i + 1]);
    return pieces;
}

std::vector<Piece> Partition::chunk(int chunk) const {
    if (layout_ == Layout::kBalanced) return pieces_of_rank(chunk);
    std::vector<Piece> pieces;
    const int parts = num_parts_ / num_chunks();  // in a chunk
    const int64_t first = rows_before(chunk * parts), last = rows_before((chunk + 1) * parts);
    for (size_t i = 0; i + 1 < bounds_.size(); ++i) {
        const int64_t begin = bounds_[i], end = bounds_[i + 1];
        if (packing_ == Packing::kPerDocument) {
            append(pieces, i, begin, part_begin(i, chunk * parts), part_begin(i, (chunk + 1) * parts));
        } else {
            append(pieces, i, begin, std::max(begin, first), std::min(end, last));
        }
    }
    return pieces;
}

std::vector<Piece> Partition::pieces_of_rank(int rank) const {
    std::vector<Piece> pieces;
    for (const Span& held : spans_) {
        if (held.rank != rank) continue;
        const auto first = std::upper_bound(bounds_.begin(), bounds_.end(), held.begin) - 1;
        for (auto bound = first; bound + 1 != bounds_.end() && *bound < held.end; ++bound) {
            append(pieces, static_cast<int>(bound - bounds_.begin()), *bound, std::max(*bound, held.begin),
                   std::min(*(bound + 1), held.end));
        }
    }
    return pieces;
}

std::vector<Piece> Partition::local(int rank) const {
    std::vector<Piece> pieces;
    for (const int held : chunks_of(rank)) {
        const std::vector<Piece> part = chunk(held);
        pieces.insert(pieces.end(), part.begin(), part.end());
    }
    if (packing_ == Packing::kPerDocument) {
        std::stable_sort(pieces.begin(), pieces.end(),
                         [](const Piece& a, const Piece& b) { return a.document < b.document; });
    }
    int32_t begin = 0;
    for (Piece& piece : pieces) {
        piece.begin = begin;
        begin += piece.length;
    }
    return pieces;
}

std::vector<int64_t> Partition::local_positions(int rank) const {
    std::vector<int64_t> rows;
    rows.reserve(num_local_rows(rank));
    for (const Piece& piece : local(rank)) {
        for (int32_t i = 0; i < piece.length; ++i) rows.push_back(piece.stream_row + i);
    }
    return rows;
}

std::vector<int64_t> Partition::gathered_positions() const {
    std::vector<int64_t> rows;
    const int64_t padded = max_local_rows();
    rows.reserve(size_ * padded);
    for (int rank = 0; rank < size_; ++rank) {
        const std::vector<int64_t> part = local_positions(rank);
        rows.insert(rows.end(), part.begin(), part.end());
        rows.resize((rank + 1) * padded, kNoRow);
    }
    return rows;
}

std::vector<int64_t> Partition::chunk_rows(int rank, int chunk) const {
    const std::vector<Piece> buffer = local(rank);
    std::vector<int64_t> rows;
    auto next = buffer.begin();
    for (const Piece& piece : this->chunk(chunk)) {
        next = std::find_if(next, buffer.end(), [&](const Piece& held) { return held.stream_row == piece.stream_row; });
        if (next == buffer.end())
            throw InvalidArgument(concat("rank ", rank, " must hold chunk ", chunk, ", got chunks of other ranks"));
        for (int32_t i = 0; i < piece.length; ++i) rows.push_back(next->begin + i);
    }
    return rows;
}

}  // namespace megatron_sb::plan
