"""What users pass: parameters and their groups, arguments, trees and which of their leaves count."""
