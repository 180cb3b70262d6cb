// Folds the runs of a context-parallel forward (plan/schedule.h) into the output of each row, on every GPU from sm_80
// on. With (o, P) of a newer run and (o', P') of the next older one, the result is (o + P o', P P').
//
// When the mass of a row falls below mass_threshold, or is a NaN, older runs contribute nothing to the row.
#pragma once

#include "core/params.h"

namespace megatron_sb::fold {

// All tensors are contiguous and begin at multiples of 16 bytes.
struct Run {
    int32_t row_begin, num_rows;  // the rows that the run has
    const float* o;               // (batch, num_rows, num_heads, head_dim_v): the output of this run alone
    const float* mass;            // (batch, num_heads, num_rows): what it leaves of a full stick
    // Results. Null: not wanted.
    float* mass_in = nullptr;  // as `mass`: the mass at its newer edge, 0 for a row that newer runs have used up
    float* older_o = nullptr;  // as `o`: the output of all older runs
};
inline constexpr int kMostRuns = 3;

struct Params {
    int32_t batch, rows, num_heads;
    int32_t head_dim_v;  // a multiple of 4
    float mass_threshold;
    int32_t num_runs;
    Run runs[kMostRuns];  // newest to oldest
    Dtype o_dtype;        // not kFloat64
    // Results: of all runs together. Rows in no run get o = 0 and mass = 1.
    void* o;      // (batch, rows, num_heads, head_dim_v)
    float* mass;  // (batch, num_heads, rows)
};

// Launches on `stream`, a cudaStream_t. Throws RuntimeFailure if the launch fails. Does nothing without rows.
void fold(const Params& params, void* stream);

}  // namespace megatron_sb::fold
