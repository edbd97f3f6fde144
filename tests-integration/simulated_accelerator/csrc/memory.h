// The memory of the devices, which the host may not touch, and pinned memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/CachingDeviceAllocator.h>

#include "streams.h"

namespace sim {

c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();

bool is_pinned(const void* address);
// Pinned memory that ``stream`` reads or writes is not handed out again before the stream has come here.
void use_pinned(const void* address, Stream& stream);

// The address at which a stream's thread sees a device's memory.
char* visible(const void* address);
c10::DeviceIndex device_of(const void* address);
void record_stream(const void* address, Stream& stream);

}  // namespace sim
