// The split of a stream of packed documents over the ranks of a context-parallel group.
//
// zigzag splits the stream into 2 * size chunks, and rank r holds chunks r and 2 * size - 1 - r. contiguous splits it
// into `size` chunks, and rank r holds chunk r. With `per_document` every document is split into that many parts, and
// chunk i consists of part i of every document. If the length of a document does not divide, some of its parts have one
// row more than the others; the documents take turns with the parts. With `whole_stream` the stream as a whole is
// split. Rows after the last document form a tail that no query sees; the tail is split like a document.
//
// balanced splits the stream at any row, so that ranks have nearly equal work (balanced_partition.h). It does not use
// the packing. Chunk r then consists of all rows of rank r, in the order of the stream.
//
// In every layout the rows of two chunks, and of two ranks, differ by at most one. With fewer rows than ranks, some
// ranks have none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/balanced_partition.h"

namespace megatron_sb::plan {

enum class Layout : int8_t { kZigzag, kContiguous, kBalanced };
enum class Packing : int8_t { kPerDocument, kWholeStream };

// Throw InvalidArgument for an unknown name.
Layout parse_layout(const std::string& name);
Packing parse_packing(const std::string& name);
const char* name_of(Layout layout);
const char* name_of(Packing packing);

// Rows [begin, begin + length) of a buffer are positions [position, position + length) of a document and rows
// [stream_row, stream_row + length) of the whole stream.
struct Piece {
    int32_t document;
    int32_t position;
    int32_t stream_row;
    int32_t begin;
    int32_t length;
};

inline constexpr int64_t kNoRow = -1;
inline constexpr int kMaxRanks = (1 << 30) - 1;  // zigzag has twice as many chunks, counted by an int

// Returns the sum of the rows of all ranks. Throws InvalidArgument, which begins with `what`, if a rank has less than 0
// or more than 2^31 - 1: the sum could overflow.
int64_t sum_of_rows(const char* what, const std::vector<int64_t>& rows);

class Partition {
  public:
    // `cu_seqlens` has the start of each document and the end of the last; nullopt means one document of seq_len rows.
    // Throws InvalidArgument if cu_seqlens do not start at 0, decrease or end beyond seq_len.
    Partition(Layout layout, Packing packing, int size, int64_t seq_len,
              const std::optional<std::vector<int64_t>>& cu_seqlens);

    // Returns the split of the same stream over `size` ranks. `size` must divide the size of this partition. Rank i of
    // the result holds the rows of this partition's ranks [i * ratio, (i + 1) * ratio), where ratio is size() / size.
    Partition over(int size) const;

    Layout layout() const { return layout_; }
    int size() const { return size_; }
    int64_t num_rows() const { return bounds_.back(); }
    int64_t num_local_rows(int rank) const { return local_rows_[rank]; }
    // Returns the first rank that has another number of rows than `rows` gives it, or -1. `rows`: by rank.
    int rank_with_other_rows(const std::vector<int64_t>& rows) const {
        const auto other = std::mismatch(local_rows_.begin(), local_rows_.end(), rows.begin()).first;
        return other == local_rows_.end() ? -1 : static_cast<int>(other - local_rows_.begin());
    }
    int64_t max_local_rows() const { return *std::max_element(local_rows_.begin(), local_rows_.end()); }
    int num_chunks() const { return layout_ == Layout::kZigzag ? 2 * size_ : size_; }
    // Whether keys can move around a ring in order (plan/schedule.h): chunks must be neighbours in every document.
    bool has_ring() const { return layout_ != Layout::kBalanced; }
    // Pieces with document >= num_documents() belong to the tail.
    int num_documents() const { return num_documents_; }

    // Returns the chunks of a rank in the order of their lanes (plan/schedule.h): the low chunk, then the high chunk.
    std::vector<int> chunks_of(int rank) const;
    int64_t num_chunk_rows(int chunk) const;

    // Return the pieces of the whole stream, of a chunk, and of the local buffer of a rank. The local buffer is in
    // Megatron's order. per_document: the low part and the high part of each document in turn. whole_stream: the low
    // chunk, then the high chunk. balanced: the order of the stream; a buffer may have several pieces of a document.
    std::vector<Piece> stream() const;
    std::vector<Piece> chunk(int chunk) const;
    std::vector<Piece> local(int rank) const;

    // Returns the stream row of each local row of a rank.
    std::vector<int64_t> local_positions(int rank) const;
    // Returns the stream row of each row of the local buffers of all ranks, one buffer after another. Each is padded to
    // max_local_rows() with rows kNoRow.
    std::vector<int64_t> gathered_positions() const;
    // Returns the local row of each row of a chunk. Throws InvalidArgument if `rank` does not hold the chunk.
    std::vector<int64_t> chunk_rows(int rank, int chunk) const;

  private:
    // Returns the first stream row of part `part` of a document (or of the tail), of the parts that the constructor
    // made.
    int64_t part_begin(size_t document, int part) const;
    // Returns how many rows the parts before `part` have, of all documents.
    int64_t rows_before(int part) const;
    void count_local_rows();
    std::vector<Piece> pieces_of_rank(int rank) const;  // with balanced

    Layout layout_;
    Packing packing_;
    int size_;
    int num_documents_;
    int num_parts_;                       // chunks of the partition that the constructor made; over() joins them
    std::vector<int64_t> bounds_;         // bounds of the documents and of the tail, if any
    std::vector<int> first_longer_part_;  // of each document: the first part with one row more, if any has
    std::vector<Span> spans_;             // with balanced, in the order of the stream
    std::vector<int64_t> local_rows_;     // by rank
};

}  // namespace megatron_sb::plan
