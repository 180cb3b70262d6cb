#include "plan/balanced_partition.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace megatron_sb::plan {
namespace {

// A part of the stream that contains the rows of one rank. Intervals increase, and no two of them touch.
struct Interval {
    int64_t begin;
    int64_t end;
};
using Intervals = std::vector<Interval>;

struct Window {
    Intervals intervals;
    int64_t tiles;
};

void append(Intervals& intervals, Interval next) {
    if (next.begin >= next.end) return;
    if (!intervals.empty() && intervals.back().end == next.begin) {
        intervals.back().end = next.end;
    } else {
        intervals.push_back(next);
    }
}

// Calls f(interval) for each part of rows [from, to), counted from the first row of the intervals.
template <class F>
void for_each_part(const Intervals& intervals, int64_t from, int64_t to, F f) {
    for (const Interval& interval : intervals) {
        if (to <= 0) return;
        const int64_t rows = interval.end - interval.begin;
        const int64_t begin = std::max<int64_t>(from, 0), end = std::min(to, rows);
        if (begin < end) f(Interval{interval.begin + begin, interval.begin + end});
        from -= rows;
        to -= rows;
    }
}

int64_t stream_row(const Intervals& intervals, int64_t row) {
    int64_t found = 0;
    for_each_part(intervals, row, row + 1, [&](Interval part) { found = part.begin; });
    return found;
}

// Counts the tiles of parts of a stream.
class TileCounter {
  public:
    explicit TileCounter(const std::vector<int64_t>& cu_seqlens) : bounds_(cu_seqlens), before_{0} {
        for (size_t i = 0; i + 1 < bounds_.size(); ++i) {
            before_.push_back(before_.back() + piece_tiles(0, bounds_[i + 1] - bounds_[i]));
        }
    }

    int64_t operator()(Interval rows) const {
        rows.end = std::min(rows.end, bounds_.back());
        if (rows.begin >= rows.end) return 0;
        const size_t first = document_of(rows.begin), last = document_of(rows.end - 1);
        const int64_t position = rows.begin - bounds_[first];
        if (first == last) return piece_tiles(position, rows.end - rows.begin);
        return piece_tiles(position, bounds_[first + 1] - rows.begin) + before_[last] - before_[first + 1] +
               piece_tiles(0, rows.end - bounds_[last]);
    }

    int64_t operator()(const Intervals& intervals, int64_t from, int64_t to) const {
        int64_t tiles = 0;
        for_each_part(intervals, from, to, [&](Interval part) { tiles += (*this)(part); });
        return tiles;
    }

    // Returns how far a cut before a row can move, backward (negative) and forward, to places where it is cheaper: the
    // ends of the document and of the row's tile, if tiles begin with the document.
    std::vector<int64_t> cheaper_cuts(int64_t row) const {
        if (row >= bounds_.back()) return {bounds_.back() - row};
        const size_t document = document_of(row);
        const int64_t position = row - bounds_[document], rest = bounds_[document + 1] - row;
        const int64_t in_tile = position % kWorkTileRows;
        return {-position, rest, -in_tile, std::min(rest, kWorkTileRows - in_tile)};
    }

  private:
    // The document of a row before bounds_.back().
    size_t document_of(int64_t row) const {
        return std::upper_bound(bounds_.begin(), bounds_.end(), row) - bounds_.begin() - 1;
    }

    const std::vector<int64_t>& bounds_;
    std::vector<int64_t> before_;  // tiles of all documents before a document
};

// How one attempt splits a stream. A larger tolerance leaves more windows whole, so it needs fewer cuts.
struct Attempt {
    int64_t tolerance_permille;  // how far the work of a rank may be from the mean of the rows that are left
    bool from_end;               // whether to search for a pair of windows from the end of the stream
};
// The first attempt that suffices is used, else the best one. Which pairs are best depends on where tiles happen to
// end.
constexpr Attempt kAttempts[] = {{20, false}, {5, false}, {5, true}, {0, false}, {0, true}};

// The windows are a split of the rows that no rank has yet, in stream order. Each step gives a rank a window, or a part
// of two neighbouring windows, of which the rest becomes one window.
class Splitter {
  public:
    Splitter(const TileCounter& tiles, int64_t seq_len, int size, const Attempt& attempt)
        : count_(tiles), rows_(seq_len / size), attempt_(attempt) {
        for (int i = 0; i < size; ++i) {
            const Interval rows{i * rows_, (i + 1) * rows_};
            windows_.push_back({{rows}, count_(rows)});
            total_ += windows_.back().tiles;
        }
    }

    std::vector<Intervals> split() {
        std::vector<Intervals> ranks;
        while (!windows_.empty()) ranks.push_back(take());
        return ranks;
    }

  private:
    // The difference of `tiles` from the mean of the windows, times the number of windows.
    int64_t deviation(int64_t tiles) const { return tiles * static_cast<int64_t>(windows_.size()) - total_; }
    int64_t tolerance() const { return total_ / 1000 * attempt_.tolerance_permille; }

    Intervals take() {
        for (size_t i = 0; i < windows_.size(); ++i) {
            if (std::abs(deviation(windows_[i].tiles)) <= tolerance()) return remove(i);
        }
        const size_t i = pair_across_mean();
        Intervals both = windows_[i].intervals;
        for (const Interval& interval : windows_[i + 1].intervals) append(both, interval);
        const int64_t begin = cheapest(both, nearest_to_mean(both, deviation(windows_[i].tiles) > 0),
                                       windows_[i].tiles + windows_[i + 1].tiles);
        Intervals taken, rest;
        for_each_part(both, begin, begin + rows_, [&](Interval part) { append(taken, part); });
        for_each_part(both, 0, begin, [&](Interval part) { append(rest, part); });
        for_each_part(both, begin + rows_, 2 * rows_, [&](Interval part) { append(rest, part); });
        remove(i);
        total_ -= windows_[i].tiles;
        windows_[i] = {rest, count_(rest, 0, rows_)};
        total_ += windows_[i].tiles;
        return taken;
    }

    // Returns a window i such that windows i and i + 1 are on different sides of the mean. As some window is above the
    // mean and some window is below it, there is such a pair.
    size_t pair_across_mean() const {
        const auto above = [&](size_t i) { return deviation(windows_[i].tiles) > 0; };
        size_t i = attempt_.from_end ? windows_.size() - 2 : 0;
        while (above(i) == above(i + 1)) attempt_.from_end ? --i : ++i;
        return i;
    }

    Intervals remove(size_t i) {
        Intervals intervals = std::move(windows_[i].intervals);
        total_ -= windows_[i].tiles;
        windows_.erase(windows_.begin() + static_cast<std::ptrdiff_t>(i));
        return intervals;
    }

    // Returns a first row of the rank's part of two windows, at which its work crosses the mean.
    int64_t nearest_to_mean(const Intervals& both, bool first_is_above) const {
        int64_t low = 0, high = rows_;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            const bool above = deviation(count_(both, middle, middle + rows_)) > 0;
            (above == first_is_above ? low : high) = middle;
        }
        return low;
    }

    // Returns the best first row near `begin`: the work beyond the tolerance, and the work that cuts add, are smallest.
    int64_t cheapest(const Intervals& both, int64_t begin, int64_t tiles_before) const {
        std::vector<int64_t> candidates{begin, begin + 1};
        for (const int64_t cut : {begin, begin + rows_}) {
            if (cut >= 2 * rows_) continue;
            for (const int64_t shift : count_.cheaper_cuts(stream_row(both, cut))) candidates.push_back(begin + shift);
        }
        const auto cost = [&](int64_t first) {
            const int64_t tiles = count_(both, first, first + rows_);
            const int64_t rest = count_(both, 0, first) + count_(both, first + rows_, 2 * rows_);
            const int64_t off = std::abs(deviation(tiles));
            const int64_t added = (tiles + rest - tiles_before) * static_cast<int64_t>(windows_.size());
            return std::pair{std::max<int64_t>(off - tolerance(), 0) + added, off};
        };
        int64_t best = begin;
        auto least = cost(begin);
        for (const int64_t first : candidates) {
            if (first < 0 || first > rows_) continue;
            const auto found = cost(first);
            if (found < least) least = found, best = first;
        }
        return best;
    }

    const TileCounter& count_;
    const int64_t rows_;
    const Attempt attempt_;
    std::vector<Window> windows_;
    int64_t total_ = 0;  // tiles of the windows
};

std::vector<Span> spans_in_order(std::vector<Intervals> ranks) {
    std::sort(ranks.begin(), ranks.end(),
              [](const Intervals& a, const Intervals& b) { return a[0].begin < b[0].begin; });
    std::vector<Span> spans;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        for (const Interval& rows : ranks[rank]) spans.push_back({rows.begin, rows.end, static_cast<int>(rank)});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    return spans;
}

}  // namespace

int64_t piece_tiles(int64_t position, int64_t length) {
    if (length <= 0) return 0;
    // Full tile i sees position + 64 (i + 1) - 1 keys, which are floor((at + i) / 2) tiles.
    static_assert(kWorkTileKeys == 2 * kWorkTileRows, "the sum below is written for tiles of twice as many keys");
    const auto sum_of_halves = [](int64_t n) { return (n - 1) * (n - 1) / 4; };  // of floor(i / 2) for i < n
    const int64_t full = length / kWorkTileRows;
    const int64_t at = (position + kWorkTileRows - 1 + kWorkTileKeys - 1) / kWorkTileRows;
    const int64_t keys = position + length - 1;  // that the last row sees
    const int64_t last =
        length % kWorkTileRows == 0 ? 0 : std::max<int64_t>(1, (keys + kWorkTileKeys - 1) / kWorkTileKeys);
    return sum_of_halves(at + full) - sum_of_halves(at) + last;
}

std::vector<Span> balanced_spans(const std::vector<int64_t>& cu_seqlens, int64_t seq_len, int size) {
    const TileCounter count(cu_seqlens);
    std::vector<Span> best;
    int64_t least = 0;
    for (const Attempt& attempt : kAttempts) {
        std::vector<Intervals> ranks = Splitter(count, seq_len, size, attempt).split();
        int64_t most = 0, total = 0;
        for (const Intervals& rank : ranks) {
            const int64_t tiles = count(rank, 0, seq_len);
            most = std::max(most, tiles);
            total += tiles;
        }
        if (best.empty() || most < least) {
            best = spans_in_order(std::move(ranks));
            least = most;
        }
        if (100 * most * size <= (100 + kMaxImbalancePercent) * total) break;
    }
    return best;
}

std::vector<int64_t> rank_tiles(const std::vector<int64_t>& cu_seqlens, const std::vector<Span>& spans, int size) {
    const TileCounter count(cu_seqlens);
    std::vector<int64_t> tiles(size, 0);
    for (const Span& span : spans) tiles[span.rank] += count(Interval{span.begin, span.end});
    return tiles;
}

}  // namespace megatron_sb::plan
