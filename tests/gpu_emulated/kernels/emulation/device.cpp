// Devices and streams of the emulation: the functions of torch's stable ABI that csrc/device.h calls, and the controls
// that the tests call. Tensors are in host memory and belong to the device that the test names.
#include "runtime.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

struct DeviceGuardOpaque {
  int previous;
};

struct StreamOpaque {
  int device;
};

namespace emulated {
namespace {

constexpr uintptr_t kStreams = 0x5000;  // the handle of device n's stream is this number plus n

int current_device = 0, tensors_device = 0;
std::vector<std::pair<uintptr_t, uintptr_t>> host_memory;  // starts and ends

void* stream_of(int device) { return reinterpret_cast<void*>(kStreams + device); }
std::string name_of(int device) { return "cuda:" + std::to_string(device); }

}  // namespace

void mark_host_memory(const void* start, size_t n_bytes) {
  const auto at = reinterpret_cast<uintptr_t>(start);
  host_memory.emplace_back(at, at + n_bytes);
}

void forget_host_memory() { host_memory.clear(); }

void check_device_pointer(const char* kernel, const void* pointer) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  for (const auto& [start, end] : host_memory) {
    if (start <= at && at < end) throw std::runtime_error(std::string(kernel) + " gets a pointer to memory of the host");
  }
}

int device_of_tensors() { return tensors_device; }

void check_stream(const char* operation, void* stream) {
  const std::string name = operation;
  if (stream == nullptr) throw std::runtime_error(name + " uses the default stream, not the caller's");
  const int device = static_cast<int>(reinterpret_cast<uintptr_t>(stream) - kStreams);
  if (device != current_device) {
    throw std::runtime_error(name + " uses a stream of " + name_of(device) + ", but the current device is " +
                             name_of(current_device));
  }
  if (current_device != tensors_device) {
    throw std::runtime_error(name + " runs on " + name_of(current_device) + ", but its tensors are on " +
                             name_of(tensors_device));
  }
}

}  // namespace emulated

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind, cudaStream_t stream) {
  emulated::check_stream("cudaMemcpyAsync", stream);
  emulated::mark_host_memory(from, n_bytes);
  std::memcpy(to, from, n_bytes);
  return cudaSuccess;
}

extern "C" {

using Error = int32_t;  // AOTITorchError

Error aoti_torch_create_device_guard(int32_t device, DeviceGuardOpaque** guard) {
  *guard = new DeviceGuardOpaque{emulated::current_device};
  emulated::current_device = device;
  return 0;
}

Error aoti_torch_delete_device_guard(DeviceGuardOpaque* guard) {
  emulated::current_device = guard->previous;
  delete guard;
  return 0;
}

Error aoti_torch_get_current_stream(int32_t device, StreamOpaque** stream) {
  *stream = new StreamOpaque{device};
  return 0;
}

Error aoti_torch_delete_stream(StreamOpaque* stream) {
  delete stream;
  return 0;
}

Error torch_stream_native_handle(StreamOpaque* stream, void** handle) {
  *handle = emulated::stream_of(stream->device);
  return 0;
}

Error aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = emulated::stream_of(device);
  return 0;
}

#define EMULATED_EXPORT __attribute__((visibility("default")))

EMULATED_EXPORT void emulated_set_device(int device) { emulated::tensors_device = device; }
EMULATED_EXPORT void emulated_mark_host_memory(const void* start, size_t n_bytes) {
  emulated::mark_host_memory(start, n_bytes);
}
EMULATED_EXPORT void emulated_forget_host_memory() { emulated::forget_host_memory(); }
EMULATED_EXPORT void* emulated_stream(int device) { return emulated::stream_of(device); }
EMULATED_EXPORT int emulated_current_device() { return emulated::current_device; }
EMULATED_EXPORT void emulated_set_seed(uint64_t seed) { emulated::set_seed(seed); }
EMULATED_EXPORT const char* emulated_unchecked_launch() { return emulated::unchecked_launch().c_str(); }

EMULATED_EXPORT void emulated_take_counts(emulated::Counts* counts) { *counts = emulated::take_counts(); }
}
