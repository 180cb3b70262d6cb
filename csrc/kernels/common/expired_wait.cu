#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>

#include "core/environment.h"
#include "core/error.h"
#include "kernels/common/expired_wait.h"
#include "kernels/common/launch.h"

namespace megatron_sb::common {
namespace {

struct Name {
    const char *kernel, *wait;
};

// Indexed by Wait.
constexpr Name kNames[] = {
    {"", ""},
    {"hopper", "gates.full or gates.empty"},
    {"hopper forward", "q.full"},
    {"hopper forward", "q.empty"},
    {"hopper forward", "k.full"},
    {"hopper forward", "k.empty"},
    {"hopper forward", "v.full"},
    {"hopper forward", "v.empty"},
    {"hopper forward", "tail_ring.full"},
    {"hopper forward", "tail_ring.empty"},
    {"hopper forward", "finished"},
    {"hopper backward", "qdo.full or d_o.full"},
    {"hopper backward", "qdo.empty or d_o.empty"},
    {"hopper backward", "kv.full"},
    {"hopper backward", "kv.empty"},
    {"hopper backward", "carry_in_full"},
    {"hopper backward", "carry_out_full"},
    {"hopper backward", "older_carry_out_empty or newer_carry_out_empty"},
    {"hopper backward", "dz.full"},
    {"hopper backward", "dz.empty"},
    {"hopper backward", "own_half.full"},
    {"hopper backward", "own_half.empty"},
    {"hopper backward", "steps.full"},
    {"hopper backward", "steps.empty"},
    {"hopper backward", "dq_turn"},
    {"hopper backward", "dq_added"},
    {"hopper backward", "dq_published"},
    {"hopper backward", "dq_staged.full"},
    {"hopper backward", "dq_staged.empty"},
    {"hopper backward", "the addition of the next older key tile to dq"},
    {"test", "a partner that never arrives"},
    {"test", "another one that never arrives"},
};
static_assert(std::size(kNames) == size_t(kNumWaits), "every Wait must have a name");

std::string describe(int device, ExpiredWait record) {
    std::string kernel, waits;
    for (int i = 0; i < kNumWaits; ++i) {
        if ((record >> i & 1) == 0) continue;
        kernel = kNames[i].kernel;
        waits += (waits.empty() ? "" : ", ") + std::string(kNames[i].wait);
    }
    return concat("A wait of the kernel '", kernel, "' on GPU ", device, " took longer than ", wait_limit_seconds(),
                  " s: in CTA ", record >> kCtaShift, ", threads waited for ", waits,
                  ". The kernel then ended its launch by an access to address 0.");
}

// The records of this process. A kernel writes a record once, and the host only reads it.
class Records {
  public:
    // Constructed after the CUDA runtime, so its destructor runs while the runtime still exists.
    ~Records() {
        if (!seen_ && !describe_all().empty()) std::fprintf(stderr, "megatron_sb: %s\n", describe_all().c_str());
    }

    WaitRecord* on_device(int device) {
        const std::lock_guard<std::recursive_mutex> lock(mutex_);
        const auto found = records_.find(device);
        if (found != records_.end()) return found->second.of_device;
        return records_.emplace(device, allocate()).first->second.of_device;
    }

    std::string describe_all() {
        // A child after fork() does not have the memory that CUDA allocated in its parent.
        if (getpid() != process_) return "";
        const std::lock_guard<std::recursive_mutex> lock(mutex_);
        std::string text;
        for (const auto& [device, record] : records_)
            if (record.of_host->expired != 0)
                text += (text.empty() ? "" : " ") + describe(device, record.of_host->expired);
        if (!text.empty()) seen_ = true;
        return text;
    }

  private:
    struct Record {
        const volatile WaitRecord* of_host;
        WaitRecord* of_device;
    };

    static Record allocate() {
        constexpr const char* kWhat = "record of expired waits";
        // The unit in which a wait begins does not count.
        const uint32_t limit = uint32_t((uint64_t(wait_limit_seconds()) * 1'000'000'000 >> 32) + 1);
        // In the other modes, an allocation would end the capture of a graph with an error.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        check(kWhat, "cudaThreadExchangeStreamCaptureMode", cudaThreadExchangeStreamCaptureMode(&mode));
        void *of_host = nullptr, *of_device = nullptr;
        const cudaError_t error =
            cudaHostAlloc(&of_host, sizeof(WaitRecord), cudaHostAllocMapped | cudaHostAllocPortable);
        check(kWhat, "cudaThreadExchangeStreamCaptureMode", cudaThreadExchangeStreamCaptureMode(&mode));
        check(kWhat, "cudaHostAlloc", error);
        *static_cast<WaitRecord*>(of_host) = {0, limit};
        check(kWhat, "cudaHostGetDevicePointer", cudaHostGetDevicePointer(&of_device, of_host, 0));
        return {static_cast<volatile WaitRecord*>(of_host), static_cast<WaitRecord*>(of_device)};
    }

    const pid_t process_ = getpid();
    // Recursive: on_device() holds it while allocate() runs, and if that fails, check() calls describe_all().
    std::recursive_mutex mutex_;
    std::map<int, Record> records_;
    std::atomic<bool> seen_ = false;
};

// Null until a kernel with waits has been launched.
std::atomic<Records*> records_of_process = nullptr;

}  // namespace

uint32_t wait_limit_seconds() {
    static const auto limit = uint32_t(integer_of_environment("MEGATRON_SB_WAIT_LIMIT_SECONDS", 60, 1, 86400));
    return limit;
}

WaitRecord* wait_record() {
    const int device = current_device();
    static Records records;
    records_of_process = &records;
    return records.on_device(device);
}

std::string describe_expired_waits() {
    Records* const records = records_of_process;
    return records == nullptr ? "" : records->describe_all();
}

}  // namespace megatron_sb::common
