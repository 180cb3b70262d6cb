#include "plan/balanced_partition.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

namespace megatron_sb::plan {
namespace {

// A larger tolerance leaves more windows whole, so it needs fewer cuts. The first one that suffices is used.
constexpr int64_t kTolerancesPermille[] = {20, 5};
constexpr size_t kMaxPartners = 16;

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

int64_t num_rows(const Intervals& intervals) {
    int64_t rows = 0;
    for (const Interval& interval : intervals) rows += interval.end - interval.begin;
    return rows;
}

// Returns the first row of a window, or a row after the stream if it has none.
int64_t first_row(const Window& window) {
    return window.intervals.empty() ? std::numeric_limits<int64_t>::max() : window.intervals[0].begin;
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

// The rows of two ranks, of which one rank gets the part [begin, begin + rows of a) and the other one gets the rest,
// which has as many rows as b.
class TwoWindows {
  public:
    TwoWindows(const TileCounter& count, const Intervals& a, const Intervals& b)
        : count_(count), rows_(num_rows(a)), last_begin_(num_rows(b)) {
        Intervals all = a;
        all.insert(all.end(), b.begin(), b.end());
        std::sort(all.begin(), all.end(), [](const Interval& x, const Interval& y) { return x.begin < y.begin; });
        for (const Interval& interval : all) append(both_, interval);
    }

    int64_t part_tiles(int64_t begin) const { return count_(both_, begin, begin + rows_); }
    int64_t rest_tiles(int64_t begin) const {
        return count_(both_, 0, begin) + count_(both_, begin + rows_, last_begin_ + rows_);
    }

    // Returns the begin with the least cost near a place where `above` changes, or near the last begin if it is the
    // same everywhere.
    template <class Above, class Cost>
    int64_t best_begin(Above above, Cost cost) const {
        int64_t low = 0, high = last_begin_;
        const bool above_at_first = above(low);
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (above(middle) == above_at_first ? low : high) = middle;
        }
        std::vector<int64_t> candidates{high};
        for (const int64_t cut : {low, low + rows_}) {
            for (const int64_t shift : count_.cheaper_cuts(stream_row(both_, cut))) candidates.push_back(low + shift);
        }
        int64_t best = low;
        auto least = cost(low);
        for (const int64_t begin : candidates) {
            if (begin < 0 || begin > last_begin_) continue;
            const auto found = cost(begin);
            if (found < least) least = found, best = begin;
        }
        return best;
    }

    // Returns the part and the rest.
    std::pair<Intervals, Intervals> split(int64_t begin) const {
        std::pair<Intervals, Intervals> result;
        for_each_part(both_, begin, begin + rows_, [&](Interval rows) { append(result.first, rows); });
        for_each_part(both_, 0, begin, [&](Interval rows) { append(result.second, rows); });
        for_each_part(both_, begin + rows_, last_begin_ + rows_, [&](Interval rows) { append(result.second, rows); });
        return result;
    }

  private:
    const TileCounter& count_;
    const int64_t rows_;        // of the part
    const int64_t last_begin_;  // rows of the rest
    Intervals both_;
};

// The windows are a split of the rows that no rank has yet, in stream order. Each step gives a rank a window, or a part
// of two neighbouring windows, of which the rest becomes one window.
class Splitter {
  public:
    // `tolerance_permille`: how far the work of a rank may be from the mean of the rows that are left.
    Splitter(const TileCounter& count, int64_t seq_len, int size, int64_t tolerance_permille)
        : count_(count), tolerance_permille_(tolerance_permille) {
        const auto begin_of = [&](int64_t i) { return i * (seq_len / size) + std::min(i, seq_len % size); };
        for (int i = 0; i < size; ++i) {
            const Interval rows{begin_of(i), begin_of(i + 1)};
            Intervals intervals;
            append(intervals, rows);
            windows_.push_back({std::move(intervals), count_(rows)});
            total_ += windows_.back().tiles;
        }
    }

    // Returns a window for each rank.
    std::vector<Window> split() {
        std::vector<Window> ranks;
        while (!windows_.empty()) ranks.push_back(take());
        return ranks;
    }

  private:
    int64_t num_windows() const { return static_cast<int64_t>(windows_.size()); }
    // The difference of `tiles` from the mean of the windows, times the number of windows.
    int64_t deviation(int64_t tiles) const { return tiles * num_windows() - total_; }
    int64_t tolerance() const { return total_ / 1000 * tolerance_permille_; }

    Window take() {
        for (size_t i = 0; i < windows_.size(); ++i) {
            if (std::abs(deviation(windows_[i].tiles)) <= tolerance()) return remove(i);
        }
        // Some window is above the mean and some window is below it, so two neighbours are on different sides.
        size_t i = 0;
        while ((deviation(windows_[i].tiles) > 0) == (deviation(windows_[i + 1].tiles) > 0)) ++i;
        const TwoWindows both(count_, windows_[i].intervals, windows_[i + 1].intervals);
        const int64_t tiles_before = windows_[i].tiles + windows_[i + 1].tiles;
        const int64_t begin = both.best_begin(
            [&](int64_t first) { return deviation(both.part_tiles(first)) > 0; },
            [&](int64_t first) {  // the work beyond the tolerance plus the work that cuts add, then the difference
                const int64_t tiles = both.part_tiles(first), off = std::abs(deviation(tiles));
                const int64_t added = (tiles + both.rest_tiles(first) - tiles_before) * num_windows();
                return std::pair{std::max<int64_t>(off - tolerance(), 0) + added, off};
            });
        auto [part, rest] = both.split(begin);
        remove(i);
        total_ -= windows_[i].tiles;
        windows_[i] = {std::move(rest), both.rest_tiles(begin)};
        total_ += windows_[i].tiles;
        return {std::move(part), both.part_tiles(begin)};
    }

    Window remove(size_t i) {
        Window window = std::move(windows_[i]);
        total_ -= window.tiles;
        windows_.erase(windows_.begin() + static_cast<std::ptrdiff_t>(i));
        return window;
    }

    const TileCounter& count_;
    const int64_t tolerance_permille_;
    std::vector<Window> windows_;
    int64_t total_ = 0;  // tiles of the windows
};

// A total order, so that every implementation of std::sort gives the same result.
bool fewer_tiles(const Window& a, const Window& b) {
    return std::pair{a.tiles, first_row(a)} < std::pair{b.tiles, first_row(b)};
}

bool is_balanced(const std::vector<Window>& ranks, int64_t most) {
    int64_t total = 0;
    for (const Window& rank : ranks) total += rank.tiles;
    return 100 * most * static_cast<int64_t>(ranks.size()) <= (100 + kMaxImbalancePercent) * total;
}

bool is_balanced(const std::vector<Window>& ranks) {
    return is_balanced(ranks, std::max_element(ranks.begin(), ranks.end(), fewer_tiles)->tiles);
}

// Divides the rows of two ranks again, of the one with the most work and of one with little work, until the work is
// balanced or no partner helps. How well two ranks can divide their rows depends on where tiles end, so several
// partners are tried.
void even_out(std::vector<Window>& ranks, const TileCounter& count) {
    for (size_t step = 0; step < ranks.size(); ++step) {
        std::sort(ranks.begin(), ranks.end(), fewer_tiles);
        Window& most = ranks.back();
        if (is_balanced(ranks, most.tiles)) return;
        const size_t num_partners = std::min<size_t>(kMaxPartners, ranks.size() - 1);
        Window best_part{{}, most.tiles}, best_rest{{}, most.tiles};
        std::optional<size_t> best;
        for (size_t i = 0; i < num_partners; ++i) {
            const TwoWindows both(count, ranks[i].intervals, most.intervals);
            const auto larger = [&](int64_t begin) { return std::max(both.part_tiles(begin), both.rest_tiles(begin)); };
            const int64_t begin =
                both.best_begin([&](int64_t first) { return both.part_tiles(first) > both.rest_tiles(first); }, larger);
            if (larger(begin) >= std::max(best_part.tiles, best_rest.tiles)) continue;
            auto [part, rest] = both.split(begin);
            best_part = {std::move(part), both.part_tiles(begin)};
            best_rest = {std::move(rest), both.rest_tiles(begin)};
            best = i;
            if (is_balanced(ranks, larger(begin))) break;
        }
        if (!best) return;
        most = std::move(best_rest);
        ranks[*best] = std::move(best_part);
    }
}

std::vector<Span> spans_in_order(std::vector<Window> ranks) {
    std::sort(ranks.begin(), ranks.end(), [](const Window& a, const Window& b) { return first_row(a) < first_row(b); });
    std::vector<Span> spans;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        for (const Interval& rows : ranks[rank].intervals)
            spans.push_back({rows.begin, rows.end, static_cast<int>(rank)});
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
    std::vector<Window> ranks;
    for (const int64_t tolerance_permille : kTolerancesPermille) {
        ranks = Splitter(count, seq_len, size, tolerance_permille).split();
        if (is_balanced(ranks)) return spans_in_order(std::move(ranks));
    }
    even_out(ranks, count);
    return spans_in_order(std::move(ranks));
}

std::vector<int64_t> rank_tiles(const std::vector<int64_t>& cu_seqlens, const std::vector<Span>& spans, int size) {
    const TileCounter count(cu_seqlens);
    std::vector<int64_t> tiles(size, 0);
    for (const Span& span : spans) tiles[span.rank] += count(Interval{span.begin, span.end});
    return tiles;
}

}  // namespace megatron_sb::plan
