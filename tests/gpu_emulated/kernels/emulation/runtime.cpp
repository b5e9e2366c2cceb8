// The scheduler of runtime.h. It is compiled without ThreadSanitizer, which sees the kernels and what orders them.
#include "runtime.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr uint64_t kMaxGridX = (uint64_t{1} << 31) - 1, kMaxGridYZ = 65535;
constexpr uint64_t kMaxBlock = 1024, kMaxBlockZ = 64;
constexpr size_t kMaxShared = 48 << 10;  // without cudaFuncSetAttribute
constexpr unsigned char kUninitialised = 0xA5;

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Thread {
  Fiber fiber;
  dim3 index;
  State state = State::kReady;
  Site site;  // of the barrier or the warp operation
  const char* operation = "";
  unsigned mask = 0;
  uint64_t value = 0;
  uint64_t gathered[kLanes] = {};  // of the mask of which this is the first lane
};

struct Block {
  std::vector<std::unique_ptr<std::byte[]>> arrays;
  std::byte* dynamic = nullptr;
  size_t shared_bytes = 0;
  std::vector<std::unique_ptr<Thread>> previous;  // for ThreadSanitizer: stacks and thread numbers must not be reused
  std::unique_ptr<char[]> order;                  // addresses of its barrier and its warps, for ThreadSanitizer
};

std::vector<std::unique_ptr<Thread>> threads;
std::vector<Block> blocks;  // of the launch; the last one runs
const std::function<void()>* body = nullptr;
Configuration launched;
unsigned current = 0;
uint64_t n_blocks = 0, seed = 1, max_waits = 1 << 20;
std::string failure;  // of a thread
std::string refused;  // configuration, for cudaGetLastError
std::string unchecked;  // kernel, launched since cudaGetLastError
std::string message;  // of the last error that it returned
Counts counts;
std::unordered_map<const void*, uint64_t> atomics;  // of the block, by address
char grid_order;

void release(void* order) {
#if defined(EMULATED_TSAN)
  __tsan_release(order);
#else
  (void)order;
#endif
}

void acquire(void* order) {
#if defined(EMULATED_TSAN)
  __tsan_acquire(order);
#else
  (void)order;
#endif
}

std::string text_of(dim3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string place_of(const Thread& thread) {
  if (thread.state == State::kDone) return "has returned";
  const std::string file = thread.site.file_name();
  return std::string("waits at ") + thread.operation + " in " + file.substr(file.rfind('/') + 1) + ":" +
         std::to_string(thread.site.line());
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(std::string("kernel ") + launched.kernel + ", block " + text_of(blockIdx) + ": " + what);
}

bool is_same(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() && std::string_view(a.file_name()) == b.file_name();
}

void enter() {
  threads[current]->fiber.entered();
  (*body)();
  threads[current]->state = State::kDone;
  release(&grid_order);
  threads[current]->fiber.pause(true);
}

void wait(State state, const char* operation, Site site) {
  Thread& thread = *threads[current];
  thread.state = state, thread.operation = operation, thread.site = site;
  thread.fiber.pause(false);
}

void run_thread(unsigned i) {
  current = i;
  threadIdx = threads[i]->index;
  threads[i]->fiber.resume();
  if (!failure.empty()) fail("thread " + text_of(threads[i]->index) + ": " + std::exchange(failure, {}));
}

// Returns true if all lanes of the mask of thread `i` have met it, and exchanges their values.
bool meets(unsigned i) {
  Thread& thread = *threads[i];
  const unsigned first = i / kLanes * kLanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!(thread.mask >> lane & 1)) continue;
    if (first + lane >= blockDim.count()) fail("the mask has lane " + std::to_string(lane) + ", which does not exist");
    const Thread& other = *threads[first + lane];
    if (other.state != State::kInWarp || other.mask != thread.mask || !is_same(other.site, thread.site)) return false;
  }
  uint64_t* gathered = threads[first + std::countr_zero(thread.mask)]->gathered;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const bool is_here = thread.mask >> lane & 1;
    gathered[lane] = is_here ? threads[first + lane]->value : 0;
    if (is_here) threads[first + lane]->state = State::kReady;
  }
  return true;
}

[[noreturn]] void report_deadlock(unsigned n) {
  for (unsigned i = 0; i < n; ++i) {
    const Thread& thread = *threads[i];
    if (thread.state != State::kInWarp) continue;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const Thread& other = *threads[i / kLanes * kLanes + lane];
      if (!(thread.mask >> lane & 1)) continue;
      const bool is_here = other.state == State::kInWarp && is_same(other.site, thread.site);
      if (is_here && other.mask == thread.mask) continue;
      fail("lane " + std::to_string(i % kLanes) + " " + place_of(thread) + ", but lane " + std::to_string(lane) +
           " of its mask " + (is_here ? "has another mask" : place_of(other)));
    }
  }
  const auto first = std::find_if(threads.begin(), threads.begin() + n,
                                  [](const auto& thread) { return thread->state == State::kAtBarrier; });
  for (unsigned i = 0; i < n; ++i) {
    const Thread& other = *threads[i];
    if (other.state == State::kAtBarrier && is_same(other.site, (*first)->site)) continue;
    fail("thread " + text_of((*first)->index) + " " + place_of(**first) + ", but thread " + text_of(other.index) + " " +
         place_of(other));
  }
  std::abort();
}

// Returns false when all threads have returned.
bool release_waiting(unsigned n) {
  bool is_released = false;
  unsigned n_done = 0, n_at_barrier = 0;
  const Thread* at_barrier = nullptr;
  for (unsigned i = 0; i < n; ++i) {
    if (threads[i]->state == State::kInWarp) is_released = meets(i) || is_released;
  }
  if (is_released) return true;
  for (unsigned i = 0; i < n; ++i) {
    const Thread& thread = *threads[i];
    n_done += thread.state == State::kDone;
    if (thread.state != State::kAtBarrier) continue;
    if (at_barrier == nullptr) at_barrier = &thread;
    n_at_barrier += is_same(thread.site, at_barrier->site);
  }
  if (n_done == n) return false;
  if (n_at_barrier != n) report_deadlock(n);
  for (unsigned i = 0; i < n; ++i) threads[i]->state = State::kReady;
  return true;
}

void run_block() {
  const auto n = static_cast<unsigned>(blockDim.count());
#if !defined(EMULATED_TSAN)
  blocks.clear();
#endif
  Block& block = blocks.emplace_back();
#if defined(EMULATED_TSAN)
  block.previous = std::move(threads);
  threads.clear();
#endif
  while (threads.size() < n) threads.push_back(std::make_unique<Thread>());
  block.order.reset(new char[1 + kMaxBlock / kLanes]);
  block.shared_bytes = launched.dynamic_bytes;
  block.dynamic = block.arrays.emplace_back(new std::byte[launched.dynamic_bytes]).get();
  ++n_blocks, ++counts.blocks;
  for (unsigned i = 0; i < n; ++i) {
    Thread& thread = *threads[i];
    thread.fiber.begin(enter);
    thread.state = State::kReady;
    thread.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
  }
  std::vector<unsigned> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(seed + n_blocks);
  uint64_t round = 0;
  do {
    if (++round > max_waits) fail("no end after " + std::to_string(max_waits) + " barriers or warp operations");
    if (seed != 0) std::shuffle(order.begin(), order.end(), random);
    for (const unsigned i : order) {
      if (threads[i]->state == State::kReady) run_thread(i);
    }
  } while (release_waiting(n));
  for (const auto& [address, n_adds] : atomics) counts.hottest = std::max(counts.hottest, n_adds);
  atomics.clear();
}

// Returns why a device refuses a configuration, or an empty string.
std::string objection(const Configuration& given) {
  const dim3 &grid = given.grid, &block = given.block;
  if (grid.count() == 0 || grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
    return "a grid of " + text_of(grid) + " blocks";
  }
  if (block.count() == 0 || block.count() > kMaxBlock || block.z > kMaxBlockZ) {
    return "a block of " + text_of(block) + " threads";
  }
  if (given.dynamic_bytes > kMaxShared) return std::to_string(given.dynamic_bytes) + " bytes of shared memory";
  return "";
}

}  // namespace

void run(const Configuration& configuration, const std::function<void()>& kernel) {
  launched = configuration;
  unchecked = configuration.kernel;
  check_stream(configuration.kernel, configuration.stream);
  if (const std::string why = objection(configuration); !why.empty()) {
    refused = "a device refuses " + why;
    return;
  }
  ++counts.launches;
  body = &kernel;
  gridDim = configuration.grid, blockDim = configuration.block;
  blocks.clear();
  atomics.clear();
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block();
    }
  }
  acquire(&grid_order);
  blocks.clear();
}

void fail_thread(const std::string& what) {
  failure = what;
  threads[current]->fiber.pause(true);
  std::abort();
}

void wait_for_block(Site site) {
  ++counts.barriers;
  char* order = &blocks.back().order[0];
  release(order);
  wait(State::kAtBarrier, "__syncthreads", site);
  acquire(order);
}

const uint64_t* exchange(unsigned mask, uint64_t value, const char* operation, Site site, bool orders_memory) {
  ++counts.exchanges;
  Thread& thread = *threads[current];
  if (!(mask >> lane() & 1)) {
    fail_thread(std::string(operation) + ": lane " + std::to_string(lane()) + " is not in its own mask");
  }
  thread.mask = mask, thread.value = value;
  char* order = &blocks.back().order[1 + current / kLanes];
  if (orders_memory) release(order);
  wait(State::kInWarp, operation, site);
  if (orders_memory) acquire(order);
  return threads[current / kLanes * kLanes + std::countr_zero(mask)]->gathered;
}

unsigned lane() { return current % kLanes; }

void count_atomic(const void* address) {
  ++counts.atomics;
  ++atomics[address];
}

uint64_t block_number() { return n_blocks; }

std::byte* shared_memory(size_t size, size_t& n_bytes) {
  Block& block = blocks.back();
  n_bytes = size == 0 ? launched.dynamic_bytes : size;
  if (size == 0) return block.dynamic;
  block.shared_bytes += size;
  if (block.shared_bytes > kMaxShared) {
    const std::string most = std::to_string(kMaxShared);
    fail_thread(std::to_string(block.shared_bytes) + " bytes of shared memory, more than " + most);
  }
  std::byte* array = block.arrays.emplace_back(new std::byte[size]).get();
  for (size_t i = 0; i < size; ++i) static_cast<volatile std::byte*>(array)[i] = std::byte{kUninitialised};
  return array;
}

Counts take_counts() { return std::exchange(counts, {}); }
void set_seed(uint64_t given) { seed = given; }
void set_max_waits(uint64_t given) { max_waits = given; }
const std::string& unchecked_launch() { return unchecked; }

}  // namespace emulated

cudaError_t cudaGetLastError() {
  emulated::unchecked.clear();
  emulated::message = std::exchange(emulated::refused, {});
  return emulated::message.empty() ? cudaSuccess : cudaErrorInvalidConfiguration;
}

const char* cudaGetErrorString(cudaError_t) { return emulated::message.c_str(); }
