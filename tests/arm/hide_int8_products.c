// Preloaded: a processor or virtual machine that reports bfloat16 products but none of int8. qemu has none like it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/auxv.h>

unsigned long getauxval(unsigned long type) {
    unsigned long (*real)(unsigned long) = (unsigned long (*)(unsigned long))dlsym(RTLD_NEXT, "getauxval");
    return type == AT_HWCAP ? real(type) & ~HWCAP_ASIMDDP : real(type);
}
