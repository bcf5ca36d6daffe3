// Sleep for some microseconds as a program of a CPU device, and return the operand.
#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Sleep(ffi::AnyBuffer given, ffi::Result<ffi::AnyBuffer> found, int64_t micros) {
  std::this_thread::sleep_for(std::chrono::microseconds(micros));
  std::memcpy(found->untyped_data(), given.untyped_data(), given.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SleepFor, Sleep,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int64_t>("micros"));
