#include "textflag.h"

// func rawVfork(trap, a1, a2, a3 uintptr) (pid, errno uintptr)
//
// The return address waits in the link register, which the kernel keeps for parent and child each.
TEXT ·rawVfork(SB),NOSPLIT|NOFRAME,$0-48
	MOVD	a1+8(FP), R0
	MOVD	a2+16(FP), R1
	MOVD	a3+24(FP), R2
	MOVD	$0, R3
	MOVD	$0, R4
	MOVD	$0, R5
	MOVD	trap+0(FP), R8
	SVC
	CMN	$4095, R0
	BCC	ok
	NEG	R0, R0
	MOVD	$0, R4
	MOVD	R4, pid+32(FP)
	MOVD	R0, errno+40(FP)
	RET
ok:
	MOVD	R0, pid+32(FP)
	MOVD	ZR, errno+40(FP)
	RET
