// What the processor reports about itself, for any x86-64 processor; see features.py.
#include <cpuid.h>
#include <stdint.h>

// stores eax, ebx, ecx and edx; all are 0 where the processor has no such leaf
void anabranch_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t* registers) {
  for (int i = 0; i < 4; ++i) registers[i] = 0;
  __get_cpuid_count(leaf, subleaf, registers, registers + 1, registers + 2, registers + 3);
}

// XCR0: the register states that the system saves; only where CPUID reports OSXSAVE
uint64_t anabranch_saved_states(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}
