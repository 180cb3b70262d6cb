// How a stream of packed documents is cut over the ranks of a context-parallel group.
//
// The stream is cut into chunks, 2 * size for zigzag and size for contiguous; rank r holds chunks r and 2 * size - 1 -
// r, or chunk r. `per_document` cuts every document into that many parts, and a chunk is its part of every document;
// `whole_stream` cuts the stream. Rows beyond the last document are a tail that no query sees: they are cut as one more
// document would be.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megatron_sb::plan {

enum class Layout : int8_t { kZigzag, kContiguous };
enum class Packing : int8_t { kPerDocument, kWholeStream };

Layout parse_layout(const std::string& name);
Packing parse_packing(const std::string& name);
const char* name_of(Layout layout);
const char* name_of(Packing packing);

// Rows [begin, begin + length) of a buffer hold positions [position, position + length) of a document, which are the
// rows from stream_row on of the whole stream.
struct Piece {
    int32_t document;
    int32_t position;
    int32_t stream_row;
    int32_t begin;
    int32_t length;
};

class Partition {
  public:
    // cu_seqlens: where each document starts, and the end of the last; none: one document of seq_len rows.
    // Throws InvalidArgument for cu_seqlens that do not start at 0, decrease or end beyond seq_len, and for a length
    // that does not divide.
    Partition(Layout layout, Packing packing, int size, int64_t seq_len,
              const std::optional<std::vector<int64_t>>& cu_seqlens);

    // The same stream, cut over a number of ranks that divides this one's.
    Partition over(int size) const;

    Layout layout() const { return layout_; }
    int size() const { return size_; }
    int64_t num_rows() const { return bounds_.back(); }
    int64_t num_local_rows() const { return num_rows() / size_; }
    int num_chunks() const { return layout_ == Layout::kZigzag ? 2 * size_ : size_; }
    // Documents from this number on are the tail.
    int num_documents() const { return num_documents_; }

    // The chunks of a rank in the order of their lanes: the low one, then the high one.
    std::vector<int> chunks_of(int rank) const;

    std::vector<Piece> stream() const;
    std::vector<Piece> chunk(int chunk) const;
    // The local buffer of a rank, in Megatron's order: document by document the low part and the high part; for
    // `whole_stream` the low chunk and the high chunk.
    std::vector<Piece> local(int rank) const;

    // For each local row of a rank its row in the stream.
    std::vector<int64_t> local_positions(int rank) const;
    // The row in the stream of each row of the buffers of all ranks, one after the other.
    std::vector<int64_t> gathered_positions() const;
    // For each row of a chunk that `rank` holds its row in the rank's local buffer.
    std::vector<int64_t> chunk_rows(int rank, int chunk) const;

  private:
    void check_lengths(bool packed) const;

    Layout layout_;
    Packing packing_;
    int size_;
    int num_documents_;
    std::vector<int64_t> bounds_;  // of the documents and of the tail, if there is one
};

}  // namespace megatron_sb::plan
