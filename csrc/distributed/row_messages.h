// Messages that send ranges of rows directly from the tensor of one rank to the tensor of another rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/transport.h"
#include "plan/key_rows.h"

namespace megatron_sb::distributed {

// Adds a message to or from `peer` for each range: the rows of x (rows, ..) that begin at range.*first. A tensor that
// receives must be contiguous. Of another one, rows that are not contiguous are copied.
inline void add_row_messages(std::vector<Message>& messages, int peer, const std::vector<plan::RowRange>& ranges,
                             int64_t plan::RowRange::*first, const at::Tensor& x) {
    for (const plan::RowRange& range : ranges) {
        messages.push_back({peer, x.narrow(0, range.*first, range.count).contiguous()});
    }
}

}  // namespace megatron_sb::distributed
